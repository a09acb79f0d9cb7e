// A disk in memory, as one file of a FUSE file system that a loop device makes a block device of. It fails on command.
//
//     failing_disk FOLDER MEGABYTES [IMAGE]
//
// mounts itself at FOLDER: "disk" is the disk, and what is written to "control" is a command:
//     fail 1 | fail 0      refuse writes with EIO, or take them again
//     refuse N             refuse the N-th write from now on, counted from 1, and no other
//     dump PATH            write what the disk holds, which is what a loss of power leaves, to a file
//     record PATH BASE     dump to BASE, and record from now on in PATH every write, flush and mark
//     mark TEXT            record this text
//     count PATH           write how many writes there were to a file
// A record is a kind ("w", "f" or "m"), the length of its content, its place on the disk, and the content.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { ROOT = 1, DISK = 2, CONTROL = 3, AT_ONCE = 1 << 20 };

static int device;
static char* disk;
static uint64_t size, writes;
static long refused;  // 1: the next one
static int fails;
static FILE* log_file;

static void reply(uint64_t request, int error, const void* content, size_t length) {
    struct fuse_out_header head = {sizeof head + length, -error, request};
    struct iovec parts[2] = {{&head, sizeof head}, {(void*)content, length}};
    if (writev(device, parts, length ? 2 : 1) < 0 && errno != ENOENT) perror("reply");
}

static void describe(struct fuse_attr* attr, uint64_t node) {
    memset(attr, 0, sizeof *attr);
    attr->ino = node;
    attr->nlink = node == ROOT ? 2 : 1;
    attr->mode = node == ROOT ? S_IFDIR | 0755 : S_IFREG | 0600;
    attr->size = node == DISK ? size : 0;
    attr->blocks = attr->size / 512;
    attr->blksize = 4096;
}

static void record(char kind, uint64_t offset, uint32_t length, const char* content) {
    if (!log_file) return;
    struct {
        uint32_t kind, length;
        uint64_t offset;
    } head = {kind, length, offset};
    fwrite(&head, sizeof head, 1, log_file);
    fwrite(content, 1, length, log_file);
    fflush(log_file);
}

static void dump(const char* path) {
    static const char zeros[4096];
    FILE* file = fopen(path, "w");
    for (uint64_t at = 0; at < size; at += sizeof zeros) {
        if (!memcmp(disk + at, zeros, sizeof zeros)) continue;  // a hole
        fseeko(file, at, SEEK_SET);
        fwrite(disk + at, 1, sizeof zeros, file);
    }
    fflush(file);
    if (ftruncate(fileno(file), size)) perror("dump");
    fclose(file);
}

static void command(const char* line) {
    char path[4096], base[4096];
    if (sscanf(line, "fail %d", &fails) == 1 || sscanf(line, "refuse %ld", &refused) == 1) return;
    if (!strncmp(line, "mark ", 5)) {
        record('m', 0, strcspn(line + 5, "\n"), line + 5);
    } else if (sscanf(line, "record %4095s %4095s", path, base) == 2) {
        dump(base);
        log_file = fopen(path, "w");
    } else if (sscanf(line, "dump %4095s", path) == 1) {
        dump(path);
    } else if (sscanf(line, "count %4095s", path) == 1) {
        FILE* file = fopen(path, "w");
        fprintf(file, "%lu", (unsigned long)writes);
        fclose(file);
    }
}

static void write_to(struct fuse_in_header* head, struct fuse_write_in* in) {
    const char* content = (const char*)(in + 1);
    struct fuse_write_out out = {.size = in->size};
    if (head->nodeid == CONTROL) {
        char line[8192] = "";
        memcpy(line, content, in->size < sizeof line ? in->size : sizeof line - 1);
        command(line);
    } else {
        ++writes;
        if (fails || (refused > 0 && --refused == 0)) return reply(head->unique, EIO, NULL, 0);
        memcpy(disk + in->offset, content, in->size);
        record('w', in->offset, in->size, content);
    }
    reply(head->unique, 0, &out, sizeof out);
}

static void answer(struct fuse_in_header* head) {
    void* in = head + 1;
    switch (head->opcode) {
        case FUSE_INIT: {
            struct fuse_init_in* init = in;
            struct fuse_init_out out = {.major = 7, .minor = 31, .max_readahead = 1 << 17, .max_write = AT_ONCE};
            out.flags = init->flags & (FUSE_BIG_WRITES | FUSE_MAX_PAGES | FUSE_ASYNC_READ);
            out.max_pages = AT_ONCE / 4096;
            return reply(head->unique, 0, &out, sizeof out);
        }
        case FUSE_LOOKUP: {
            uint64_t node = !strcmp(in, "disk") ? DISK : !strcmp(in, "control") ? CONTROL : 0;
            if (!node) return reply(head->unique, ENOENT, NULL, 0);
            struct fuse_entry_out out = {.nodeid = node, .attr_valid = 1000, .entry_valid = 1000};
            describe(&out.attr, node);
            return reply(head->unique, 0, &out, sizeof out);
        }
        case FUSE_GETATTR:
        case FUSE_SETATTR: {
            struct fuse_attr_out out = {.attr_valid = 1000};
            describe(&out.attr, head->nodeid);
            return reply(head->unique, 0, &out, sizeof out);
        }
        case FUSE_OPEN:
        case FUSE_OPENDIR: {
            struct fuse_open_out out = {.fh = head->nodeid, .open_flags = FOPEN_DIRECT_IO};
            return reply(head->unique, 0, &out, sizeof out);
        }
        case FUSE_READ: {
            struct fuse_read_in* read = in;
            uint64_t left = head->nodeid == DISK && read->offset < size ? size - read->offset : 0;
            return reply(head->unique, 0, disk + read->offset, read->size < left ? read->size : left);
        }
        case FUSE_WRITE:
            return write_to(head, in);
        case FUSE_FSYNC:
            record('f', 0, 0, NULL);
            return reply(head->unique, 0, NULL, 0);
        case FUSE_FLUSH:
        case FUSE_RELEASE:
        case FUSE_RELEASEDIR:
        case FUSE_ACCESS:
            return reply(head->unique, 0, NULL, 0);
        case FUSE_STATFS: {
            struct fuse_statfs_out out = {.st = {.bsize = 4096, .blocks = size / 4096, .namelen = 255}};
            return reply(head->unique, 0, &out, sizeof out);
        }
        case FUSE_FORGET:
        case FUSE_BATCH_FORGET:
            return;
        case FUSE_DESTROY:
            exit(0);
        default:
            return reply(head->unique, ENOSYS, NULL, 0);
    }
}

int main(int count, char** arguments) {
    size = strtoull(arguments[2], NULL, 10) << 20;
    disk = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (count > 3) {
        FILE* image = fopen(arguments[3], "r");
        if (!image || !fread(disk, 1, size, image)) return 1;
        fclose(image);
    }
    device = open("/dev/fuse", O_RDWR);
    char options[128];
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0,allow_other", device);
    if (device < 0 || mount("failing_disk", arguments[1], "fuse", 0, options)) return 1;
    static char buffer[AT_ONCE + (1 << 16)];
    for (;;) {
        ssize_t got = read(device, buffer, sizeof buffer);
        if (got < 0 && errno != EINTR && errno != EAGAIN && errno != ENOENT) return 0;
        if (got > 0) answer((struct fuse_in_header*)buffer);
    }
}
