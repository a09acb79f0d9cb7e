// Which calls leave their results in the caches.
#pragma once

#include <cstdint>

namespace fedcore {

// The size of the last cache, if the system reports it. A call that moves more bytes, and does not write in place,
// stores its results past the caches (past_caches.inl), because they would not stay there. Smaller calls would be
// slower that way. 8 clients' rows to other rows, plain time over that past the caches, two cores of a Zen 3 with 32
// MiB:
//     MB moved       1.9     6       12      24      48      96
//     MIFA           0.87    0.95    0.89    1.16    1.12    1.13
//     first rows     0.84    0.88    0.90    1.05    1.11    1.17
std::int64_t cached_bytes();
void set_cached_bytes(std::int64_t bytes);  // for tests; the results are the same bits

}  // namespace fedcore
