// How many cores this process may keep busy.
#pragma once

#include <string>

namespace fedcore {

// The cores that the process may run on, or, if less, the CPU quota of its control groups (version 1 or 2) in cores,
// rounded down, but at least 1. With more threads the system would stop one of them for a part of every period, while
// it holds a piece of work. Quotas that cannot be read set no limit.
//   root: the path of /, for tests.
int usable_cores(const std::string& root = "");

}  // namespace fedcore
