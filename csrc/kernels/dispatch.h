// Chooses the kernels' ISA level once, at the first call.
#pragma once

#include "base/isa.h"
#include "kernels/table.h"

namespace fedcore {

const Table& table();
Isa active_isa();

}  // namespace fedcore
