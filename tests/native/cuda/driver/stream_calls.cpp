// Streams and events.
#include "context.h"

namespace fake_cuda {
namespace {

std::string of(Handle stream) {
    return "stream=" + std::to_string(reinterpret_cast<std::uintptr_t>(stream));
}

// Events are known to all contexts.
std::shared_ptr<Event> event_of(Handle handle) {
    for (const auto& context : driver().contexts)
        if (const std::shared_ptr<Event>* const found = context->events.find(handle)) return *found;
    return nullptr;
}

}  // namespace

int cuStreamCreate(Handle* stream, unsigned flags) {
    return call_in_context(__func__, "", [&](Context& context) {
        if (stream == nullptr || flags > 1) return kInvalidValue;
        context.streams.push_back(std::make_shared<Stream>(context, flags == 0));
        *stream = new_handle();
        context.stream_of[*stream] = context.streams.back();
        return 0;
    });
}

// What it has to do is still done, as on a GPU.
int cuStreamDestroy(Handle stream) {
    return call_in_context(__func__, of(stream),
                           [&](Context& context) { return context.stream_of.erase(stream) != 0 ? 0 : kInvalidHandle; });
}

int cuCtxSynchronize() {
    return call_in_context(__func__, "", [&](Context& context) {
        context.run_all();
        return 0;
    });
}

int cuStreamSynchronize(Handle stream) {
    return call_in_context(__func__, of(stream), [&](Context& context) {
        const auto waited = context.stream(stream);
        if (!waited) return kInvalidHandle;
        waited->end().run();
        return 0;
    });
}

int cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) {
    return call_in_context(__func__, of(stream), [&](Context& context) {
        const auto waits = context.stream(stream);
        const auto waited = event_of(event);
        if (!waits || !waited) return kInvalidHandle;
        if (flags > 1) return kInvalidValue;
        waits->issue([position = waited->recorded] { position.run(); });
        return 0;
    });
}

int cuEventCreate(Handle* event, unsigned flags) {
    return call_in_context(__func__, "", [&](Context& context) {
        if (event == nullptr || flags > 3) return kInvalidValue;
        *event = context.events.add(std::make_shared<Event>(Event{context, {}}));
        return 0;
    });
}

int cuEventDestroy(Handle event) {
    return call_in_context(__func__, "", [&](Context&) {
        const auto found = event_of(event);
        if (!found) return kInvalidHandle;
        found->context.events.remove(event);
        return 0;
    });
}

int cuEventRecord(Handle event, Handle stream) {
    return call_in_context(__func__, of(stream), [&](Context& context) {
        const auto found = event_of(event);
        const auto recorded = context.stream(stream);
        if (!found || !recorded || &found->context != &context) return kInvalidHandle;
        recorded->issue([] {});  // in the legacy stream it stands behind all others
        found->recorded = recorded->end();
        return 0;
    });
}

int cuEventSynchronize(Handle event) {
    return call_in_context(__func__, "", [&](Context&) {
        const auto found = event_of(event);
        if (!found) return kInvalidHandle;
        found->recorded.run();
        return found->context.lost;
    });
}

}  // namespace fake_cuda
