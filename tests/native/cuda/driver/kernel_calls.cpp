// Modules, functions and launches.
#include <cstdlib>
#include <cstring>

#include "context.h"
#include "kernel_table.h"

namespace fake_cuda {
namespace {

constexpr unsigned kFatBinary = 0xba55ed50;
constexpr int kSharedAttribute = 8, kCarveoutAttribute = 9, kMostShared = 227 << 10;
constexpr std::uint64_t kMostThreads = 1024, kMostBlocksX = (std::uint64_t{1} << 31) - 1, kMostBlocks = 65535;

bool is_image(const void* image) {
    unsigned magic = 0;
    if (image != nullptr) std::memcpy(&magic, image, sizeof magic);
    return magic == kFatBinary || std::getenv("FAKE_CUDA_ANY_IMAGE") != nullptr;
}

void run(Context& context, const fedcore::test::EmulatedKernel& kernel, const cuda_on_host::Launch& how,
         const std::vector<char>& argument) {
    static std::uint64_t order = 0;  // in which threads take turns
    context.lost = driver().recorder.failure("kernel");
    if (context.lost != 0) return;
    context.memory.open_all();
    kernel.run(how, order++, argument.data());
    context.memory.check(kernel.name);
}

}  // namespace

// FAKE_CUDA_ANY_IMAGE: any image will do, or none, as that of a module that was built without nvcc.
int cuModuleLoadData(Handle* module, const void* image) {
    return call_in_context(__func__, "", [&](Context& context) {
        if (module == nullptr) return kInvalidValue;
        if (!is_image(image)) return kInvalidImage;
        *module = context.modules.add(0);
        return 0;
    });
}

int cuModuleGetFunction(Handle* function, Handle module, const char* name) {
    return call_in_context(__func__, name, [&](Context& context) {
        if (context.modules.find(module) == nullptr) return kInvalidHandle;
        const auto* const kernel = fedcore::test::find_emulated_kernel(name);
        if (kernel == nullptr) return kNotFound;
        *function = context.functions.add({kernel});
        return 0;
    });
}

int cuFuncSetAttribute(Handle function, int attribute, int value) {
    return call_in_context(__func__, "", [&](Context& context) {
        Function* const found = context.functions.find(function);
        if (found == nullptr) return kInvalidHandle;
        if (attribute == kCarveoutAttribute) return value >= -1 && value <= 100 ? 0 : kInvalidValue;
        if (attribute != kSharedAttribute || value < 0 || value > kMostShared) return kInvalidValue;
        found->most_shared_bytes = static_cast<std::size_t>(value);
        return 0;
    });
}

// A kernel has one argument, which is read now, whatever the caller does with it next.
int cuLaunchKernel(Handle function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                   unsigned block_y, unsigned block_z, unsigned shared_bytes, Handle stream, void** arguments,
                   void** extra) {
    const auto text = [](unsigned x, unsigned y, unsigned z) {
        return std::to_string(x) + "x" + std::to_string(y) + "x" + std::to_string(z);
    };
    return call_in_context(__func__, "", [&](Context& context) {
        const Function* const found = context.functions.find(function);
        const auto queue = context.stream(stream);
        if (found == nullptr || !queue) return kInvalidHandle;
        driver().recorder.add(std::string(found->kernel->name) + " grid=" + text(grid_x, grid_y, grid_z) +
                              " stream=" + std::to_string(reinterpret_cast<std::uintptr_t>(stream)));
        const std::uint64_t threads = std::uint64_t{block_x} * block_y * block_z;
        const bool has_blocks = grid_x > 0 && grid_y > 0 && grid_z > 0;
        const bool is_small = grid_x <= kMostBlocksX && grid_y <= kMostBlocks && grid_z <= kMostBlocks;
        if (!has_blocks || !is_small || threads == 0 || threads > kMostThreads) return kInvalidValue;
        if (shared_bytes > found->most_shared_bytes || arguments == nullptr || extra != nullptr) return kInvalidValue;
        const auto* const first = static_cast<const char*>(arguments[0]);
        const cuda_on_host::Launch how{dim3(grid_x, grid_y, grid_z), dim3(block_x, block_y, block_z), shared_bytes};
        queue->issue([&context, kernel = found->kernel, how,
                      argument = std::vector<char>(first, first + found->kernel->call_bytes)] {
            run(context, *kernel, how, argument);
        });
        return 0;
    });
}

}  // namespace fake_cuda
