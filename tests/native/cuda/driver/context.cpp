#include "context.h"

#include <unistd.h>

#include <set>

namespace fake_cuda {
namespace {

// Why no function but cuInit works in this process, or 0. A child of a process that had called it cannot either.
int readiness() {
    return driver().process == getpid() ? 0 : kNotInitialised;
}

}  // namespace

Handle new_handle() {
    static std::uintptr_t last = 0x1000;
    return reinterpret_cast<Handle>(last += 16);
}

Context::Context(int of) : device(of), legacy(std::make_shared<Stream>(*this, true)) {}

std::shared_ptr<Stream> Context::stream(Handle handle) {
    static thread_local std::map<Context*, std::shared_ptr<Stream>> own;
    const auto number = reinterpret_cast<std::uintptr_t>(handle);
    if (number <= 1) return legacy;
    if (number == 2) {
        std::shared_ptr<Stream>& mine = own[this];
        if (!mine) streams.push_back(mine = std::make_shared<Stream>(*this, true));
        return mine;
    }
    const auto found = stream_of.find(handle);
    return found == stream_of.end() ? nullptr : found->second;
}

void Context::run_all() {
    legacy->end().run();
    for (std::size_t i = 0; i < streams.size(); ++i) streams[i]->end().run();
}

Driver& driver() {
    static auto& made = *new Driver;  // used until the process ends
    return made;
}

std::recursive_mutex& turns() {
    static auto& made = *new std::recursive_mutex;
    return made;
}

std::vector<Context*>& current_contexts() {
    static thread_local std::vector<Context*> stack;
    return stack;
}

bool is_lasting(int code) {
    static const std::set<int> codes{214, 700, 702, 710, 714, 715, 716, 717, 718, 719};
    return codes.count(code) != 0;
}

int call(const char* name, const std::string& detail, const std::function<int()>& body) {
    const std::lock_guard<std::recursive_mutex> turn(turns());
    Recorder& recorder = driver().recorder;
    recorder.note(detail.empty() ? name : name + (" " + detail));
    const int failure = recorder.failure(name);
    if (failure != 0) {
        if (is_lasting(failure) && !current_contexts().empty()) current_contexts().back()->lost = failure;
        return failure;
    }
    const bool initialises = std::string(name) == "cuInit";
    const int code = !initialises && readiness() != 0 ? readiness() : body();
    DeviceMemory::close_opened();
    return code;
}

int call_in_context(const char* name, const std::string& detail, const std::function<int(Context&)>& body) {
    return call(name, detail, [&] {
        if (current_contexts().empty()) return kInvalidContext;
        Context& context = *current_contexts().back();
        if (context.lost != 0) return context.lost;
        const int code = body(context);
        return code == 0 ? context.lost : code;
    });
}

}  // namespace fake_cuda
