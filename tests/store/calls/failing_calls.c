// Lets one call into the system fail: preloaded into a process, it stands before libc's calls on files.
//
//     fail_call(number, error, folder)   from now on the number-th call on something in the folder fails, counted from 1
//     failed_call()                      the name of the call that failed; NULL if there were fewer
//
// It counts what Python, SQLite and the store ask for alike. A close is left out: on local file systems it does not fail.
// madvise has no file: the two kinds of it that read or write pages count, and say EFAULT, as the system does.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <sys/types.h>
#include <unistd.h>

static char folder[4096];
static long left;  // 1: the next one fails
static int error;
static const char* failed;

void fail_call(long number, int code, const char* where) {
    left = 0;
    failed = NULL;
    error = code;
    strncpy(folder, where, sizeof folder - 1);
    left = number;
}

const char* failed_call(void) { return failed; }

static int fails(const char* name, int code) {
    if (__sync_sub_and_fetch(&left, 1) != 0) return 0;
    failed = name;
    errno = code;
    return 1;
}

static int is_inside(const char* path) { return !strncmp(path, folder, strlen(folder)); }

static int fails_at(const char* name, int fd) {
    if (left <= 0 || fd < 0) return 0;
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_inside(path) && fails(name, error);
}

static int fails_on(const char* name, int fd, const char* path) {
    if (left <= 0 || !path) return 0;
    if (path[0] != '/' && fd >= 0) return fails_at(name, fd);
    return is_inside(path) && fails(name, error);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

// A call with a file descriptor first, and one with a path first; what it returns when it fails is -1.
#define WITH_FD(type, name, parameters, ...) \
    type name parameters { return fails_at(#name, fd) ? -1 : NEXT(name)(__VA_ARGS__); }
#define WITH_PATH(type, name, parameters, ...) \
    type name parameters { return fails_on(#name, -1, path) ? -1 : NEXT(name)(__VA_ARGS__); }
#define WITH_PATH_AT(type, name, parameters, ...) \
    type name parameters { return fails_on(#name, fd, path) ? -1 : NEXT(name)(__VA_ARGS__); }
#define BOTH(with, type, name, parameters, ...) \
    with(type, name, parameters, __VA_ARGS__) with(type, name##64, parameters, __VA_ARGS__)

BOTH(WITH_FD, ssize_t, pread, (int fd, void* to, size_t size, off_t at), fd, to, size, at)
BOTH(WITH_FD, ssize_t, pwrite, (int fd, const void* of, size_t size, off_t at), fd, of, size, at)
BOTH(WITH_FD, int, ftruncate, (int fd, off_t size), fd, size)
BOTH(WITH_FD, int, fallocate, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
BOTH(WITH_FD, off_t, lseek, (int fd, off_t at, int from), fd, at, from)
WITH_FD(ssize_t, read, (int fd, void* to, size_t size), fd, to, size)
WITH_FD(ssize_t, write, (int fd, const void* of, size_t size), fd, of, size)

// No power is lost here, so that nothing need wait for a disk.
int fsync(int fd) { return fails_at("fsync", fd) ? -1 : 0; }
int fdatasync(int fd) { return fails_at("fdatasync", fd) ? -1 : 0; }

WITH_FD(int, sync_file_range, (int fd, off_t at, off_t size, unsigned flags), fd, at, size, flags)
WITH_FD(int, flock, (int fd, int how), fd, how)
WITH_FD(int, fchmod, (int fd, mode_t mode), fd, mode)
WITH_PATH(int, mkdir, (const char* path, mode_t mode), path, mode)
WITH_PATH(int, rmdir, (const char* path), path)
WITH_PATH(int, unlink, (const char* path), path)
WITH_PATH_AT(int, unlinkat, (int fd, const char* path, int flags), fd, path, flags)
WITH_PATH(int, rename, (const char* path, const char* to), path, to)
WITH_PATH_AT(int, renameat2, (int fd, const char* path, int to, const char* new, unsigned how), fd, path, to, new, how)
WITH_PATH(int, access, (const char* path, int mode), path, mode)
WITH_PATH_AT(int, faccessat, (int fd, const char* path, int mode, int flags), fd, path, mode, flags)

// These know structures of two names.
WITH_PATH(int, statfs, (const char* path, struct statfs* to), path, to)
WITH_PATH(int, statfs64, (const char* path, struct statfs64* to), path, to)
WITH_PATH(int, stat, (const char* path, struct stat* to), path, to)
WITH_PATH(int, stat64, (const char* path, struct stat64* to), path, to)
WITH_PATH(int, lstat, (const char* path, struct stat* to), path, to)
WITH_PATH(int, lstat64, (const char* path, struct stat64* to), path, to)
WITH_FD(int, fstat, (int fd, struct stat* to), fd, to)
WITH_FD(int, fstat64, (int fd, struct stat64* to), fd, to)
WITH_PATH_AT(int, fstatat, (int fd, const char* path, struct stat* to, int how), fd, path, to, how)
WITH_PATH_AT(int, fstatat64, (int fd, const char* path, struct stat64* to, int how), fd, path, to, how)

#define ALLOCATE(name) \
    int name(int fd, off_t at, off_t size) { return fails_at(#name, fd) ? error : NEXT(name)(fd, at, size); }
ALLOCATE(posix_fallocate)
ALLOCATE(posix_fallocate64)

#define ADVISE(name) \
    int name(int fd, off_t at, off_t size, int how) { return fails_at(#name, fd) ? error : NEXT(name)(fd, at, size, how); }
ADVISE(posix_fadvise)
ADVISE(posix_fadvise64)

#define MAP(name) \
    void* name(void* where, size_t size, int access, int how, int fd, off_t at) { \
        return fails_at(#name, fd) ? MAP_FAILED : NEXT(name)(where, size, access, how, fd, at); \
    }
MAP(mmap)
MAP(mmap64)

int madvise(void* at, size_t size, int advice) {
    int reads_or_writes = advice == 22 || advice == 23;  // MADV_POPULATE_*
    return left > 0 && reads_or_writes && fails("madvise", EFAULT) ? -1 : NEXT(madvise)(at, size, advice);
}

#define LAST(type, name, before) \
    va_list rest; \
    va_start(rest, before); \
    type name = va_arg(rest, type); \
    va_end(rest);

#define OPEN(name) \
    int name(const char* path, int how, ...) { \
        LAST(int, mode, how) \
        return fails_on(#name, -1, path) ? -1 : NEXT(name)(path, how, mode); \
    }
OPEN(open)
OPEN(open64)

#define OPEN_AT(name) \
    int name(int fd, const char* path, int how, ...) { \
        LAST(int, mode, how) \
        return fails_on(#name, fd, path) ? -1 : NEXT(name)(fd, path, how, mode); \
    }
OPEN_AT(openat)
OPEN_AT(openat64)

#define CONTROL(name, number) \
    int name(int fd, number what, ...) { \
        LAST(void*, with, what) \
        return fails_at(#name, fd) ? -1 : NEXT(name)(fd, what, with); \
    }
CONTROL(fcntl, int)
CONTROL(fcntl64, int)
CONTROL(ioctl, unsigned long)

DIR* opendir(const char* path) { return fails_on("opendir", -1, path) ? NULL : NEXT(opendir)(path); }
DIR* fdopendir(int fd) { return fails_at("fdopendir", fd) ? NULL : NEXT(fdopendir)(fd); }

#define READ(name, type) \
    struct type* name(DIR* of) { return fails_at(#name, dirfd(of)) ? NULL : NEXT(name)(of); }
READ(readdir, dirent)
READ(readdir64, dirent64)

// SQLite tries again up to a hundred times, with pauses of ten seconds together, while it cannot read a log's index.
int usleep(useconds_t pause) { return (void)pause, 0; }
