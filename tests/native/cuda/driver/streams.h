// Streams, which run nothing until the host waits for them, and events.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>

namespace fake_cuda {

struct Context;

// A place in a stream: all that was issued to it up to here.
struct Position {
    std::shared_ptr<class Stream> stream;  // null: nothing to wait for
    std::uint64_t number = 0;

    void run() const;
};

class Stream : public std::enable_shared_from_this<Stream> {
  public:
    Stream(Context& of, bool is_blocking) : context(of), blocking(is_blocking) {}

    void issue(std::function<void()> work);
    Position end() { return {shared_from_this(), issued_}; }
    void run_to(std::uint64_t number);

    Context& context;
    const bool blocking;  // it and its context's legacy stream wait for each other

  private:
    std::deque<std::function<void()>> waiting_;
    std::uint64_t issued_ = 0, done_ = 0;
};

struct Event {
    Context& context;
    Position recorded;
};

}  // namespace fake_cuda
