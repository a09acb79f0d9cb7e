// The device of a call's arrays, and their owners' streams.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/driver.h"

namespace fedcore::bindings {

constexpr int kHost = -1;  // the "device" of host memory

// The stream chosen for all calls of this thread, if any.
std::optional<cuda::Stream>& chosen_stream();

// Streams by the protocols' numbers: 1 is the legacy default stream, which CUDA also numbers 0.
inline cuda::Stream stream_of(std::intptr_t number) {
    return reinterpret_cast<cuda::Stream>(number == 1 ? 0 : number);
}
inline std::intptr_t stream_number(cuda::Stream stream) {
    const auto number = reinterpret_cast<std::intptr_t>(stream);
    return number == 0 ? 1 : number;
}

// The stream of a call, and the other streams that it waits for, once each. The call's stream is the chosen one, else
// the current one of the first array's library, else the legacy default stream.
class CallersStreams {
  public:
    CallersStreams() : mine_(chosen_stream()) {}

    cuda::Stream mine() const { return mine_.value_or(nullptr); }
    const std::vector<cuda::Stream>& others() const { return others_; }

    // The call waits for the stream's work so far.
    void wait_for(cuda::Stream other) {
        other = stream_of(reinterpret_cast<std::intptr_t>(other));
        if (std::find(others_.begin(), others_.end(), other) == others_.end()) others_.push_back(other);
    }
    // The stream of the next arrays' library.
    void follow(cuda::Stream other) {
        other = stream_of(reinterpret_cast<std::intptr_t>(other));
        if (!mine_.has_value()) mine_ = other;
        wait_for(other);
    }
    // The call's stream, fixed from now on, because an exporter gets it.
    cuda::Stream tell() {
        if (!mine_.has_value()) mine_ = nullptr;
        return *mine_;
    }

  private:
    std::optional<cuda::Stream> mine_;
    std::vector<cuda::Stream> others_;
};

}  // namespace fedcore::bindings
