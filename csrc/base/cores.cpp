#include "base/cores.h"

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <sstream>
#include <thread>

namespace fedcore {
namespace {

constexpr double kUnlimited = 1e9;

int allowed_cores() {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
    return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));  // more cores than the set can hold
}

// "max 100000", or the microseconds of time in each period, and the period.
double share(std::istream&& quota_and_period) {
    double quota = 0, period = 0;  // "max" does not parse
    if (!(quota_and_period >> quota >> period) || quota <= 0 || period <= 0) return kUnlimited;
    return quota / period;
}

double share_v1(const std::string& folder) {
    double quota = 0, period = 0;
    std::ifstream(folder + "/cpu.cfs_quota_us") >> quota;  // -1 for none
    std::ifstream(folder + "/cpu.cfs_period_us") >> period;
    return quota > 0 && period > 0 ? quota / period : kUnlimited;
}

// The smallest share of a group and its parents. In a container the mount may be the group's own folder, whatever path
// the file names.
template <class Share>
double least_share(const std::string& mount, std::string group, const Share& share_of) {
    double least = share_of(mount);
    while (!group.empty() && group != "/") {
        least = std::min(least, share_of(mount + group));
        group.erase(group.rfind('/'));
    }
    return least;
}

// One line of /proc/self/cgroup, `number:controllers:/group`; version 2 has neither number nor controllers.
double share_by(const std::string& root, const std::string& line) {
    const std::size_t first = line.find(':'), second = line.find(':', first + 1);
    if (second == std::string::npos || line.compare(second + 1, 1, "/") != 0) return kUnlimited;
    const std::string controllers = line.substr(first + 1, second - first - 1), group = line.substr(second + 1);
    const std::string mount = root + "/sys/fs/cgroup";
    if (controllers.empty())
        return least_share(mount, group,
                           [](const std::string& folder) { return share(std::ifstream(folder + "/cpu.max")); });
    std::istringstream listed(controllers);
    for (std::string controller; std::getline(listed, controller, ',');)
        if (controller == "cpu")
            return std::min(least_share(mount + "/cpu", group, share_v1),
                            least_share(mount + "/" + controllers, group, share_v1));
    return kUnlimited;
}

}  // namespace

int usable_cores(const std::string& root) {
    double least = allowed_cores();
    std::ifstream groups(root + "/proc/self/cgroup");
    for (std::string line; std::getline(groups, line);) least = std::min(least, share_by(root, line));
    return std::max(1, static_cast<int>(least));
}

}  // namespace fedcore
