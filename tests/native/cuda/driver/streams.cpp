#include "streams.h"

#include <vector>

#include "context.h"

namespace fake_cuda {

void Position::run() const {
    if (stream) stream->run_to(number);
}

void Stream::issue(std::function<void()> work) {
    std::vector<Position> before;
    if (this == context.legacy.get()) {
        for (const auto& other : context.streams)
            if (other->blocking) before.push_back(other->end());
    } else if (blocking) {
        before.push_back(context.legacy->end());
    }
    waiting_.push_back([before = std::move(before), work = std::move(work)] {
        for (const Position& position : before) position.run();
        work();
    });
    ++issued_;
}

void Stream::run_to(std::uint64_t number) {
    while (done_ < number) {
        const std::function<void()> next = std::move(waiting_.front());
        waiting_.pop_front();
        ++done_;
        if (context.lost == 0) next();
    }
}

}  // namespace fake_cuda
