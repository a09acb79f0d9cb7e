// Runs a call's kernels on its arrays' device.
#pragma once

#include "bindings/arrays.h"
#include "bindings/without_gil.h"
#include "cuda/call.h"

namespace fedcore::bindings {

// Calls on_host() or on_device(queue), without the GIL, since each reads its arrays once, which takes milliseconds.
template <class OnHost, class OnDevice>
void run_where_arrays_lie(Arrays& arrays, const OnHost& on_host, const OnDevice& on_device) {
    std::vector<cuda::Stream> gone;
    {
        const WithoutGil scope;
        if (!arrays.on_device()) return on_host();
        cuda::Call call(cuda::Device::get(arrays.device()), arrays.streams().mine(), arrays.streams().others());
        gone = call.gone();
        on_device(call);
    }
    arrays.forget_users(gone);
}

}  // namespace fedcore::bindings
