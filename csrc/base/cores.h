// How many cores this process may keep busy.
#pragma once

#include <string>

namespace fedcore {

// The cores that the process may run on, or, if that is less, the cores' worth of time that its control groups (of
// version 1 or 2) give it, rounded down, but at least 1: a thread more would be stopped for a part of every period,
// with a piece of work in its hands. What cannot be read sets no limit.
//   root: where / is, for tests.
int usable_cores(const std::string& root = "");

}  // namespace fedcore
