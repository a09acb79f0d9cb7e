// The driver for tests: a stream runs nothing until the host waits for it, and the order of waits.
#include "driver_tests.h"

using namespace fedcore::test;

namespace {

// Pinned memory that a stream is to write, from a device's that holds this value by then.
struct Written {
    Written(const Cuda& made, float value) : cuda(made), at(made.memory(sizeof value)), host(made.pinned<float>(1)) {
        CHECK(cuda.cuMemcpyHtoDAsync(at, &value, sizeof value, nullptr) == 0);
        CHECK(cuda.cuStreamSynchronize(nullptr) == 0);
        *host = 0;
    }
    void read(Handle stream) const {
        CHECK(cuda.cuMemcpyDtoHAsync(const_cast<float*>(host), at, sizeof(float), stream) == 0);
    }
    void write(Handle stream, float value) const {
        CHECK(cuda.cuMemcpyHtoDAsync(at, &value, sizeof value, stream) == 0);
    }

    const Cuda& cuda;
    Address at;
    volatile float* host;
};

}  // namespace

DRIVER_TEST(nothing_runs_before_somebody_waits) {
    const Written one(cuda, 7);
    const Handle stream = cuda.stream(), other = cuda.stream();
    one.read(stream);
    CHECK(cuda.cuStreamSynchronize(other) == 0);
    CHECK(*one.host == 0);
    CHECK(cuda.cuStreamSynchronize(stream) == 0);
    CHECK(*one.host == 7);
}

DRIVER_TEST(pinned_memory_is_read_late_and_other_memory_at_once) {
    const Written one(cuda, 0);
    const Handle stream = cuda.stream();
    auto* const pinned = cuda.pinned<float>(1);
    *pinned = 1;
    CHECK(cuda.cuMemcpyHtoDAsync(one.at, pinned, sizeof(float), stream) == 0);
    *pinned = 2;
    CHECK(cuda.cuStreamSynchronize(stream) == 0);
    CHECK(cuda.read(one.at, 1)[0] == 2);
    float value = 3;
    CHECK(cuda.cuMemcpyHtoDAsync(one.at, &value, sizeof value, stream) == 0);
    value = 4;
    CHECK(cuda.cuMemcpyDtoHAsync(&value, one.at, sizeof value, stream) == 0);
    CHECK(value == 3);
}

DRIVER_TEST(an_event_is_the_place_where_it_was_recorded) {
    const Written one(cuda, 5), late(cuda, 6);
    const Handle stream = cuda.stream(), other = cuda.stream(), event = cuda.event();
    CHECK(cuda.cuEventSynchronize(event) == 0);
    one.read(stream);
    CHECK(cuda.cuEventRecord(event, stream) == 0);
    late.read(stream);
    CHECK(cuda.cuStreamWaitEvent(other, event, 0) == 0);
    CHECK(cuda.cuEventRecord(event, stream) == 0);  // the other stream waits for the first place
    CHECK(cuda.cuStreamSynchronize(other) == 0);
    CHECK(*one.host == 5 && *late.host == 0);
    CHECK(cuda.cuEventSynchronize(event) == 0);
    CHECK(*late.host == 6);
}

DRIVER_TEST(the_legacy_stream_and_blocking_streams_wait_for_each_other) {
    const Written one(cuda, 1);
    const Handle blocking = cuda.stream(0), free = cuda.stream(1);
    one.write(blocking, 2);
    one.read(nullptr);  // behind the write
    CHECK(cuda.cuStreamSynchronize(nullptr) == 0);
    CHECK(*one.host == 2);
    one.write(nullptr, 3);
    one.read(blocking);
    CHECK(cuda.cuStreamSynchronize(blocking) == 0);
    CHECK(*one.host == 3);
    one.write(free, 4);
    one.read(nullptr);  // does not wait for it
    CHECK(cuda.cuStreamSynchronize(reinterpret_cast<Handle>(1)) == 0);
    CHECK(*one.host == 3);
}

DRIVER_TEST(freeing_memory_waits) {
    const Written one(cuda, 8);
    one.read(cuda.stream());
    CHECK(cuda.cuMemFree(cuda.memory(1)) == 0);
    CHECK(*one.host == 8);
}

DRIVER_TEST(work_of_a_destroyed_stream_is_done) {
    const Written one(cuda, 9);
    const Handle stream = cuda.stream(), event = cuda.event();
    one.read(stream);
    CHECK(cuda.cuEventRecord(event, stream) == 0);
    CHECK(cuda.cuStreamDestroy(stream) == 0);
    CHECK(*one.host == 0);
    CHECK(cuda.cuStreamSynchronize(stream) == fake_cuda::kInvalidHandle);
    CHECK(cuda.cuStreamDestroy(stream) == fake_cuda::kInvalidHandle);
    CHECK(cuda.cuEventSynchronize(event) == 0);
    CHECK(*one.host == 9);
    CHECK(cuda.cuEventDestroy(event) == 0);
    CHECK(cuda.cuEventDestroy(event) == fake_cuda::kInvalidHandle);
    CHECK(cuda.cuEventSynchronize(event) == fake_cuda::kInvalidHandle);
}

DRIVER_TEST(handles_belong_to_a_device) {
    const Handle stream = cuda.stream(), event = cuda.event();
    CHECK(cuda.cuCtxPushCurrent(cuda.contexts[1]) == 0);
    CHECK(cuda.cuStreamSynchronize(stream) == fake_cuda::kInvalidHandle);
    CHECK(cuda.cuEventRecord(event, nullptr) == fake_cuda::kInvalidHandle);
    CHECK(cuda.cuStreamWaitEvent(nullptr, event, 0) == 0);  // events alone are waited for across devices
}
