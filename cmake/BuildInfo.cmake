# Compiles what the library says of itself: versions, architectures, and a fingerprint of the sources it was built from.

function(cutlass_bn_add_build_info target)
  set(directory "${PROJECT_BINARY_DIR}/build_info")
  string(REPLACE ";" "\", \"" architectures "${CUTLASS_BN_ARCHITECTURES}")
  if(CUTLASS_BN_HAS_GEMM)
    set(gemm_architectures "\"90a-real\"")
  endif()
  configure_file("${PROJECT_SOURCE_DIR}/cmake/build_info.cpp.in" "${directory}/build_info.cpp" @ONLY)
  # Runs at every build and writes only on a change.
  add_custom_target(cutlass_bn_fingerprint
    COMMAND "${Python_EXECUTABLE}" "${PROJECT_SOURCE_DIR}/tools/fingerprint.py" --header "${directory}/fingerprint.h"
    BYPRODUCTS "${directory}/fingerprint.h"
    COMMENT "Fingerprint of csrc"
    VERBATIM)
  target_sources(${target} PRIVATE "${directory}/build_info.cpp")
  add_dependencies(${target} cutlass_bn_fingerprint)
endfunction()
