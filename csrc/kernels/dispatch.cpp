#include "kernels/dispatch.h"

#include "base/isa.h"

namespace fedcore {

FEDCORE_EACH_LEVEL(const Table loops)

const Table& table() {
    return *of_level(&baseline::loops, &avx2::loops, &avx512::loops);
}

}  // namespace fedcore
