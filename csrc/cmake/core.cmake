# All native code except the bindings, for the Python module and for the native tests.
set(CMAKE_CXX_STANDARD 17)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
# (Clang does not know the warnings of GCC that the sources leave out at a place.)
set(FEDCORE_WARNINGS -Wall -Wextra -Wshadow $<$<CXX_COMPILER_ID:Clang>:-Wno-unknown-warning-option>)
# Callers' threads may have stacks of 64 KiB, and all of musl's have 128: no function takes more than this of one.
# (Sanitizers lay guards around each array.)
set(FEDCORE_STACK "")
if(NOT FEDCORE_SANITIZE)
  set(FEDCORE_STACK -Wframe-larger-than=24576 -Werror=frame-larger-than$<$<CXX_COMPILER_ID:GNU>:=24576> -Werror=vla)
endif()
find_package(Threads REQUIRED)
include(isa)

function(fedcore_add_core target)
  set(sources
    base/cached.cpp
    base/chacha.cpp
    base/copy.cpp
    base/cores.cpp
    base/isa.cpp
    base/pool.cpp
    base/random.cpp
    clients/client_index.cpp
    clients/id_table.cpp
    clients/siphash.cpp
    cuda/call.cpp
    cuda/copy_stream.cpp
    cuda/device.cpp
    cuda/driver.cpp
    kernels/aggregate.cpp
    kernels/combine.cpp
    kernels/cuda/combine.cpp
    kernels/cuda/fold.cpp
    kernels/cuda/mix.cpp
    kernels/cuda/norms.cpp
    kernels/cuda/quantise.cpp
    kernels/cuda/robust.cpp
    kernels/cuda/step.cpp
    kernels/cuda/weighted_sum.cpp
    kernels/direction.cpp
    kernels/dispatch.cpp
    kernels/exact.cpp
    kernels/exchange.cpp
    kernels/mix.cpp
    kernels/norms.cpp
    kernels/optimizer.cpp
    kernels/quantise.cpp
    kernels/robust.cpp
    kernels/tuner.cpp
    sampling/bernoulli.cpp
    sampling/gaussian.cpp
    sampling/permutation.cpp
    sampling/uniform.cpp
    sampling/weighted.cpp
    store/blake2b.cpp
    store/checksum.cpp
  )
  get_filename_component(csrc ${CMAKE_CURRENT_FUNCTION_LIST_DIR} DIRECTORY)
  list(TRANSFORM sources PREPEND ${csrc}/)
  target_sources(${target} PRIVATE ${sources})
  target_include_directories(${target} PUBLIC ${csrc})
  target_compile_options(${target} PRIVATE ${FEDCORE_WARNINGS} ${FEDCORE_STACK} -O2 -ffp-contract=off)
  target_link_libraries(${target} PUBLIC Threads::Threads ${CMAKE_DL_LIBS})
  fedcore_add_isa_levels(${target} ${csrc})
endfunction()
