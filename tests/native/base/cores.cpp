// The limits of control groups, from files as a container has them.
#include "base/cores.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <string>

#include "check.h"

using namespace fedcore;

namespace {

int allowed() {
    cpu_set_t set;
    CHECK(sched_getaffinity(0, sizeof set, &set) == 0);
    return CPU_COUNT(&set);
}

// A folder that stands for /, and is gone with it.
class Root {
  public:
    Root() {
        const char* folder = std::getenv("TMPDIR");
        path_ = std::string(folder != nullptr && *folder != 0 ? folder : "/tmp") + "/fedcore-cores-XXXXXX";
        CHECK(mkdtemp(path_.data()) != nullptr);
    }
    Root(const Root&) = delete;
    Root& operator=(const Root&) = delete;
    ~Root() { CHECK(std::system(("rm -r " + path_).c_str()) == 0); }

    Root& with(const std::string& file, const std::string& content) {
        for (std::size_t at = file.find('/', 1); at != std::string::npos; at = file.find('/', at + 1))
            mkdir((path_ + file.substr(0, at)).c_str(), 0700);
        std::ofstream(path_ + file) << content;
        return *this;
    }
    int cores() const { return usable_cores(path_); }

  private:
    std::string path_;
};

}  // namespace

TEST(no_limits) {
    CHECK(usable_cores("/nowhere") == allowed());
    CHECK(Root().cores() == allowed());
    CHECK(Root().with("/proc/self/cgroup", "0::/\n").with("/sys/fs/cgroup/cpu.max", "max 100000\n").cores() ==
          allowed());
    for (const char* nonsense : {"", "max", "0 0", "-5 100000", "100000 0", "100000", "nan nan", "1e999 1"})
        CHECK(Root().with("/proc/self/cgroup", "0::/\n").with("/sys/fs/cgroup/cpu.max", nonsense).cores() == allowed());
    for (const char* line : {"", ":", "::", "0::", "0::nowhere\n", "no line at all", "3:cpuset:/x\n"})
        CHECK(Root().with("/proc/self/cgroup", line).with("/sys/fs/cgroup/cpu.max", "100000 100000").cores() ==
              allowed());
}

TEST(version_2) {
    // one core's time, more, and less than one's, which is still one
    for (const char* quota : {"100000 100000\n", "199999 100000\n", "10000 100000\n", "1 1000000\n"})
        CHECK(Root().with("/proc/self/cgroup", "0::/\n").with("/sys/fs/cgroup/cpu.max", quota).cores() == 1);
    CHECK(Root().with("/proc/self/cgroup", "0::/\n").with("/sys/fs/cgroup/cpu.max", "250000 100000\n").cores() ==
          std::min(2, allowed()));
    // a group that the process is in, or one that this is in
    CHECK(Root()
              .with("/proc/self/cgroup", "0::/a/b\n")
              .with("/sys/fs/cgroup/a/b/cpu.max", "150000 100000\n")
              .with("/sys/fs/cgroup/a/cpu.max", "max 100000\n")
              .cores() == 1);
    CHECK(Root()
              .with("/proc/self/cgroup", "0::/a/b\n")
              .with("/sys/fs/cgroup/a/b/cpu.max", "max 100000\n")
              .with("/sys/fs/cgroup/a/cpu.max", "150000 100000\n")
              .cores() == 1);
    // in a container, whose mount is its own group, and the path that of the host
    CHECK(Root()
              .with("/proc/self/cgroup", "0::/docker/123\n")
              .with("/sys/fs/cgroup/cpu.max", "100000 100000\n")
              .cores() == 1);
}

TEST(version_1) {
    const std::string groups = "9:name=systemd:/\n4:memory:/m\n3:cpuset:/s\n2:cpu,cpuacct:/a/b\n0::/\n";
    for (const char* mount : {"/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"}) {
        for (const char* group : {"", "/a", "/a/b"}) {
            const std::string folder = std::string(mount) + group;
            CHECK(Root()
                      .with("/proc/self/cgroup", groups)
                      .with(folder + "/cpu.cfs_quota_us", "150000\n")
                      .with(folder + "/cpu.cfs_period_us", "100000\n")
                      .cores() == 1);
            CHECK(Root()
                      .with("/proc/self/cgroup", groups)
                      .with(folder + "/cpu.cfs_quota_us", "-1\n")
                      .with(folder + "/cpu.cfs_period_us", "100000\n")
                      .cores() == allowed());
        }
    }
}
