# Where things go. A wheel takes the component `python` only; `cmake --install` also installs what a C++ program needs.

if(SKBUILD_STATE STREQUAL "wheel")
  set(python_library_dir cutlass_bn/lib)
else()
  # Used in place by a checkout and by `pip install -e .`.
  set_target_properties(cutlass_bn PROPERTIES LIBRARY_OUTPUT_DIRECTORY "${PROJECT_SOURCE_DIR}/cutlass_bn/lib")
  set(python_library_dir ${CMAKE_INSTALL_LIBDIR})
endif()
if(NOT SKBUILD_STATE STREQUAL "editable")
  install(TARGETS cutlass_bn LIBRARY DESTINATION ${python_library_dir} COMPONENT python)
endif()

include(CMakePackageConfigHelpers)
set(config_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cutlass_bn)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/cutlass_bn-config-version.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_SOURCE_DIR}/cmake/cutlass_bn-config.cmake" "${PROJECT_BINARY_DIR}/cutlass_bn-config-version.cmake"
        DESTINATION ${config_dir} COMPONENT cpp)
install(TARGETS cutlass_bn_kernels EXPORT cutlass_bn
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT cpp
        FILE_SET HEADERS DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/cutlass_bn COMPONENT cpp)
install(EXPORT cutlass_bn NAMESPACE cutlass_bn:: FILE cutlass_bn-targets.cmake DESTINATION ${config_dir} COMPONENT cpp)
