// Chooses the kernels' ISA level once, at the first call.
#pragma once

#include "kernels/table.h"

namespace fedcore {

const Table& table();

}  // namespace fedcore
