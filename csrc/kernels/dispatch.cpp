#include "kernels/dispatch.h"

#include "base/isa.h"

namespace fedcore {

FEDCORE_EACH_LEVEL(const Table loops)

const Table& table() {
    return *FEDCORE_OF_LEVEL(const Table, loops);
}

}  // namespace fedcore
