# One object library per instruction-set level, all from the same plain loops.
#
# -ffp-contract=off everywhere: a contracted multiply-add rounds once where the others round twice, and the levels
# would no longer be bit-equal.
function(fedcore_add_isa_levels target csrc)
  set(levels baseline)
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND levels avx2 avx512)
    target_compile_definitions(${target} PRIVATE FEDCORE_X86_LEVELS)
  endif()
  set(flags_baseline "")
  set(flags_avx2 -mavx2 -mf16c)
  set(flags_avx512 -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mprefer-vector-width=512)
  foreach(level IN LISTS levels)
    add_library(fedcore_${level} OBJECT
      ${csrc}/base/random_level.cpp ${csrc}/kernels/level.cpp ${csrc}/store/checksum_level.cpp)
    target_include_directories(fedcore_${level} PRIVATE ${csrc})
    target_compile_definitions(fedcore_${level} PRIVATE FEDCORE_LEVEL=${level})
    target_compile_options(fedcore_${level} PRIVATE ${FEDCORE_WARNINGS} ${FEDCORE_STACK} -O3 -ffp-contract=off ${flags_${level}})
    set_target_properties(fedcore_${level} PROPERTIES
      POSITION_INDEPENDENT_CODE ON CXX_VISIBILITY_PRESET hidden)
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:fedcore_${level}>)
  endforeach()
endfunction()
