// Where the arrays of a call lie, and the streams on which their owners work.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/driver.h"

namespace fedcore::bindings {

constexpr int kHost = -1;  // the device of what lies in the host's memory

// The stream that was chosen for all calls of this thread, if one was.
std::optional<cuda::Stream>& chosen_stream();

// Streams as the protocols number them: 1 is the legacy default stream, for which CUDA itself has 0 too.
inline cuda::Stream stream_of(std::intptr_t number) {
    return reinterpret_cast<cuda::Stream>(number == 1 ? 0 : number);
}
inline std::intptr_t stream_number(cuda::Stream stream) {
    const auto number = reinterpret_cast<std::intptr_t>(stream);
    return number == 0 ? 1 : number;
}

// The stream of a call, and those of others that it waits for, once each. The stream is the one that was chosen, else
// the one on which the first array's library works now, else the legacy default one.
class CallersStreams {
  public:
    CallersStreams() : mine_(chosen_stream()) {}

    cuda::Stream mine() const { return mine_.value_or(nullptr); }
    const std::vector<cuda::Stream>& others() const { return others_; }

    // The call waits for what is there.
    void wait_for(cuda::Stream other) {
        other = stream_of(reinterpret_cast<std::intptr_t>(other));
        if (std::find(others_.begin(), others_.end(), other) == others_.end()) others_.push_back(other);
    }
    // Arrays at hand are made there.
    void follow(cuda::Stream other) {
        other = stream_of(reinterpret_cast<std::intptr_t>(other));
        if (!mine_.has_value()) mine_ = other;
        wait_for(other);
    }
    // From now on the stream stays: somebody was told of it.
    cuda::Stream tell() {
        if (!mine_.has_value()) mine_ = nullptr;
        return *mine_;
    }

  private:
    std::optional<cuda::Stream> mine_;
    std::vector<cuda::Stream> others_;
};

}  // namespace fedcore::bindings
