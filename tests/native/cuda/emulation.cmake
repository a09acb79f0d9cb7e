# CUDA's kernels, compiled as plain C++ and run by fibers: against the CPU's, and against faults that were put in.
set(cuda ${CMAKE_CURRENT_LIST_DIR})
set(kernels ${cuda}/../../../csrc/kernels/cuda)
set_source_files_properties(${kernels}/kernels.cu PROPERTIES LANGUAGE CXX COMPILE_OPTIONS "-xc++;-Wno-unknown-pragmas")
# The fibers' scheduler is shared by all of them, which is no race of theirs.
if(FEDCORE_SANITIZE STREQUAL "thread")
  set_source_files_properties(${cuda}/cuda_on_host.cpp PROPERTIES COMPILE_OPTIONS "-fno-sanitize=thread;-DFEDCORE_TSAN")
elseif(FEDCORE_SANITIZE STREQUAL "address")
  add_compile_options(-fsanitize-sections=cuda_shared)
endif()

set(levels baseline)
add_native_test(cuda cuda/aggregate.cpp cuda/exchange.cpp cuda/vectors.cpp cuda/host_queue.cpp cuda/cuda_on_host.cpp
  ${kernels}/kernels.cu ${kernels}/combine.cpp ${kernels}/fold.cpp ${kernels}/mix.cpp ${kernels}/norms.cpp
  ${kernels}/quantise.cpp ${kernels}/step.cpp ${kernels}/weighted_sum.cpp)
target_include_directories(cuda PRIVATE ${cuda})
add_executable(planted ${cuda}/planted.cpp ${cuda}/cuda_on_host.cpp)
target_include_directories(planted PRIVATE ${cuda})
target_compile_options(planted PRIVATE ${FEDCORE_WARNINGS} -O2)
add_test(NAME planted COMMAND planted)
set_tests_properties(planted PROPERTIES ENVIRONMENT "${options}" TIMEOUT 300)
