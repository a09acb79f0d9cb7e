# The image for GPUs: the kernels of csrc/kernels/cuda as nvcc compiles them, embedded in the module. The
# module does not link to CUDA; without an image it only lacks the GPU kernels.
set(FEDCORE_CUDA AUTO CACHE STRING "Compile the kernels for GPUs: AUTO where nvcc can, ON or OFF")
# A GPU's driver compiles PTX once for its chip, so only releases need machine code, which takes another 15 seconds
# for each architecture.
set(FEDCORE_CUDA_ARCHITECTURES ptx CACHE STRING
  "What the image holds: ptx (for every compute capability from 7.5), all (80;90;100;120;ptx), or a list of such")

# Each operation is rounded by itself, as on the CPU: no fused multiply-add, no flushed subnormal number.
set(FEDCORE_CUDA_FLAGS -std=c++17 -O3 -fmad=false -ftz=false -prec-div=true -prec-sqrt=true
  -Werror all-warnings -Xcompiler -Wall,-Wextra)
set(FEDCORE_NVCC_LEAST 12.8)  # which knows --compress-mode and compute capability 12.0

# Sets FEDCORE_NVCC, or `missing` to the reason why no usable nvcc exists.
function(_fedcore_find_nvcc missing)
  find_program(FEDCORE_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(NOT FEDCORE_NVCC)
    set(${missing} "nvcc was not found" PARENT_SCOPE)
    return()
  endif()
  execute_process(COMMAND ${FEDCORE_NVCC} --version OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
  string(REGEX MATCH "release [0-9.]+, V([0-9.]+)" found "${output}")
  set(version "${CMAKE_MATCH_1}")
  if(status OR NOT found OR version VERSION_LESS FEDCORE_NVCC_LEAST)
    set(${missing} "${FEDCORE_NVCC} is no nvcc of CUDA ${FEDCORE_NVCC_LEAST} or later" PARENT_SCOPE)
    return()
  endif()
  # nvcc needs a host compiler that it supports; compile an empty source to find out.
  if(NOT FEDCORE_NVCC_WORKS STREQUAL "${FEDCORE_NVCC} ${version}")
    set(empty ${CMAKE_CURRENT_BINARY_DIR}/empty.cu)
    file(WRITE ${empty} "")
    execute_process(COMMAND ${FEDCORE_NVCC} ${FEDCORE_CUDA_FLAGS} -arch=compute_75 -ptx -o ${empty}.ptx ${empty}
      OUTPUT_VARIABLE output ERROR_VARIABLE output RESULT_VARIABLE status)
    if(status)
      message(STATUS "${FEDCORE_NVCC} cannot compile an empty source: ${output}")
      set(${missing} "${FEDCORE_NVCC} could not compile" PARENT_SCOPE)
      return()
    endif()
    set(FEDCORE_NVCC_WORKS "${FEDCORE_NVCC} ${version}" CACHE INTERNAL "the nvcc that has compiled an empty source")
  endif()
endfunction()

function(fedcore_add_cuda target csrc)
  if(NOT FEDCORE_CUDA MATCHES "^(AUTO|ON|OFF)$")
    message(FATAL_ERROR "FEDCORE_CUDA: expected AUTO, ON or OFF, got ${FEDCORE_CUDA}")
  endif()
  set(missing "")
  if(FEDCORE_CUDA STREQUAL "OFF")
    set(missing "FEDCORE_CUDA was OFF")
  else()
    _fedcore_find_nvcc(missing)
  endif()
  if(missing AND FEDCORE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "FEDCORE_CUDA is ON, but ${missing}: set CUDA_HOME to a CUDA toolkit of "
      "${FEDCORE_NVCC_LEAST} or later, or leave the kernels for GPUs out by FEDCORE_CUDA=OFF")
  endif()
  set(source ${csrc}/cuda/image.cpp)
  target_sources(${target} PRIVATE ${source})
  set_source_files_properties(${source} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  if(missing)
    message(STATUS "No kernels for GPUs: ${missing}")
    set_source_files_properties(${source} PROPERTIES COMPILE_DEFINITIONS "FEDCORE_CUDA_MISSING=\"${missing}\"")
    return()
  endif()
  _fedcore_read_architectures(generated names)
  set(ptx ${CMAKE_CURRENT_BINARY_DIR}/kernels.ptx)
  set(image ${CMAKE_CURRENT_BINARY_DIR}/kernels.fatbin)
  # All machine code comes from one PTX, whose instructions the tests read.
  add_custom_command(OUTPUT ${ptx}
    COMMAND ${FEDCORE_NVCC} ${FEDCORE_CUDA_FLAGS} -I ${csrc} -arch=compute_75 -ptx -MD -MF ${ptx}.d -MT ${ptx}
      -o ${ptx} ${csrc}/kernels/cuda/kernels.cu
    DEPENDS ${csrc}/kernels/cuda/kernels.cu ${FEDCORE_NVCC} DEPFILE ${ptx}.d
    COMMENT "Compiling the kernels for GPUs: a quarter of a minute, until they change" VERBATIM)
  add_custom_command(OUTPUT ${image}
    COMMAND ${FEDCORE_NVCC} ${generated} -Werror all-warnings --compress-mode=size --threads 0 -fatbin -o ${image} ${ptx}
    DEPENDS ${ptx} ${FEDCORE_NVCC}
    COMMENT "Packing the kernels for GPUs: ${names}" VERBATIM)
  message(STATUS "Kernels for GPUs: ${names}, by ${FEDCORE_NVCC_WORKS}")
  set_source_files_properties(${source} PROPERTIES
    OBJECT_DEPENDS ${image}
    COMPILE_DEFINITIONS "FEDCORE_CUDA_IMAGE=\"${image}\";FEDCORE_CUDA_TARGETS=\"${names}\"")
endfunction()

# The options of nvcc for the PTX, and the names of its targets.
function(_fedcore_read_architectures options names)
  set(parts ${FEDCORE_CUDA_ARCHITECTURES})
  if(parts STREQUAL "all")
    set(parts 80 90 100 120 ptx)
  endif()
  set(generated "")
  set(called "")
  foreach(part IN LISTS parts)
    if(part STREQUAL "ptx")
      list(APPEND called compute_75)
    elseif(part MATCHES "^[1-9][0-9]+$")
      list(APPEND called sm_${part})
    else()
      message(FATAL_ERROR "FEDCORE_CUDA_ARCHITECTURES: expected ptx, all, or a list such as 90;ptx, got ${part}")
    endif()
  endforeach()
  if(called STREQUAL "")
    message(FATAL_ERROR "FEDCORE_CUDA_ARCHITECTURES: expected ptx, all, or a list such as 90;ptx, got nothing")
  endif()
  foreach(code IN LISTS called)
    list(APPEND generated -gencode arch=compute_75,code=${code})
  endforeach()
  list(JOIN called " " called)
  set(${options} ${generated} PARENT_SCOPE)
  set(${names} ${called} PARENT_SCOPE)
endfunction()
