# CUDA's kernels, compiled as plain C++ and run by fibers: against the CPU's, and against faults that were put in. The
# driver for tests is a libcuda that runs them, for whatever would call the true one.
set(cuda ${CMAKE_CURRENT_LIST_DIR})
set(kernels ${cuda}/../../../csrc/kernels/cuda)
set_source_files_properties(${kernels}/kernels.cu PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++;-Wno-unknown-pragmas")
# The fibers' scheduler is shared by all of them, which is no race of theirs.
if(FEDCORE_SANITIZE STREQUAL "thread")
  set_source_files_properties(${cuda}/cuda_on_host.cpp PROPERTIES COMPILE_OPTIONS "-fno-sanitize=thread;-DFEDCORE_TSAN")
elseif(FEDCORE_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize-sections=cuda_shared)
endif()

function(as_emulated target)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
  target_include_directories(${target} PRIVATE ${cuda} ${cuda}/driver $<TARGET_PROPERTY:core,INTERFACE_INCLUDE_DIRECTORIES>)
  target_compile_options(${target} PRIVATE ${FEDCORE_WARNINGS} -O1 -ffp-contract=off)
endfunction()
add_library(emulated_kernels OBJECT ${cuda}/cuda_on_host.cpp ${cuda}/kernel_table.cpp ${kernels}/kernels.cu)
as_emulated(emulated_kernels)
add_library(fedcore_fake_cuda SHARED $<TARGET_OBJECTS:emulated_kernels> ${cuda}/driver/context.cpp
  ${cuda}/driver/control.cpp ${cuda}/driver/devices.cpp ${cuda}/driver/kernel_calls.cpp ${cuda}/driver/memory.cpp
  ${cuda}/driver/memory_calls.cpp ${cuda}/driver/pages.cpp ${cuda}/driver/recorder.cpp
  ${cuda}/driver/stream_calls.cpp ${cuda}/driver/streams.cpp)
as_emulated(fedcore_fake_cuda)

set(levels baseline)
add_native_test(cuda cuda/aggregate.cpp cuda/exchange.cpp cuda/vectors.cpp cuda/host_queue.cpp
  $<TARGET_OBJECTS:emulated_kernels>)
target_include_directories(cuda PRIVATE ${cuda})
add_native_test(cuda_driver cuda/driver_kernels.cpp cuda/driver_memory.cpp cuda/driver_streams.cpp)
target_include_directories(cuda_driver PRIVATE ${cuda})
target_link_libraries(cuda_driver PRIVATE fedcore_fake_cuda)
add_executable(planted ${cuda}/planted.cpp ${cuda}/cuda_on_host.cpp)
target_include_directories(planted PRIVATE ${cuda})
target_compile_options(planted PRIVATE ${FEDCORE_WARNINGS} -O1)
add_test(NAME planted COMMAND planted)
set_tests_properties(planted PROPERTIES ENVIRONMENT "${options}" TIMEOUT 300)
