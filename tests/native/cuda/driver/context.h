// The driver's state: a context for each device, and what handles stand for.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "functions.h"
#include "memory.h"
#include "recorder.h"
#include "streams.h"

namespace fedcore::test {
struct EmulatedKernel;
}

namespace fake_cuda {

// A number that stands for an object. None is given twice, so that one that was destroyed is known as such.
Handle new_handle();

template <class Object>
class Handles {
  public:
    Handle add(Object object) {
        const Handle handle = new_handle();
        all_.emplace(handle, std::move(object));
        return handle;
    }
    Object* find(Handle handle) {
        const auto found = all_.find(handle);
        return found == all_.end() ? nullptr : &found->second;
    }
    bool remove(Handle handle) { return all_.erase(handle) != 0; }

  private:
    std::map<Handle, Object> all_;
};

struct Function {
    const fedcore::test::EmulatedKernel* kernel;
    std::size_t most_shared_bytes = 48 << 10;  // what a launch may ask for
};

// A device's primary context.
struct Context {
    explicit Context(int device);

    const int device;
    int lost = 0;  // the error behind which nothing goes any more
    DeviceMemory memory;
    std::shared_ptr<Stream> legacy;
    std::vector<std::shared_ptr<Stream>> streams;  // all others, those too that were destroyed with work in them
    std::map<Handle, std::shared_ptr<Stream>> stream_of;
    Handles<std::shared_ptr<Event>> events;
    Handles<int> modules;
    Handles<Function> functions;

    // What a handle stands for, or null: 0 and 1 are the legacy stream, 2 is the calling thread's own.
    std::shared_ptr<Stream> stream(Handle handle);
    void run_all();
};

struct Driver {
    Recorder recorder;
    Allocations pinned;
    std::map<const char*, std::size_t> registered;    // the host's own memory that is pinned, and how many bytes
    std::size_t memory_bytes = std::size_t{8} << 30;  // of each device
    std::vector<std::unique_ptr<Context>> contexts;   // empty before cuInit
    std::map<Handle, Context*> context_of;            // those that were retained
    int process = 0;                                  // that called cuInit
};

Driver& driver();
std::recursive_mutex& turns();              // one call at a time
std::vector<Context*>& current_contexts();  // the calling thread's stack

// body() as one call of the driver: recorded, one at a time, and it may be asked to fail.
int call(const char* name, const std::string& detail, const std::function<int()>& body);
// The same for a function that needs a current context, which body is given.
int call_in_context(const char* name, const std::string& detail, const std::function<int(Context&)>& body);
// Whether a context with this error is of no use any more.
bool is_lasting(int code);

}  // namespace fake_cuda
