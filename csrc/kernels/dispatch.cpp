#include "kernels/dispatch.h"

#include "base/isa.h"

namespace fedcore {

namespace baseline {
extern const Table loops;
}
#if defined(FEDCORE_X86_LEVELS)
namespace avx2 {
extern const Table loops;
}
namespace avx512 {
extern const Table loops;
}
#endif

const Table& table() {
    switch (active_isa()) {
#if defined(FEDCORE_X86_LEVELS)
        case Isa::avx512:
            return avx512::loops;
        case Isa::avx2:
            return avx2::loops;
#endif
        default:
            return baseline::loops;
    }
}

}  // namespace fedcore
