# Headers that come from Python packages. The packages are located, not imported.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter)

# Sets `root` to the folder of the Python package `module` and `version` to the version of its distribution; empty where absent.
# pip hides the environment's own packages from an isolated build; the second try, with -I, sees them all the same.
function(cutlass_bn_find_python_package module distribution root version)
  set(code "import importlib.metadata, importlib.util"
           "print(importlib.util.find_spec('${module}').submodule_search_locations[0])"
           "print(importlib.metadata.version('${distribution}'))")
  list(JOIN code "\n" code)
  foreach(flags IN ITEMS -s -I)
    execute_process(COMMAND "${Python_EXECUTABLE}" ${flags} -c "${code}" OUTPUT_VARIABLE output ERROR_QUIET RESULT_VARIABLE status)
    if(status EQUAL 0)
      string(REGEX MATCHALL "[^\n]+" lines "${output}")
      list(GET lines 0 found_root)
      list(GET lines 1 found_version)
      set(${root} "${found_root}" PARENT_SCOPE)
      set(${version} "${found_version}" PARENT_SCOPE)
      return()
    endif()
  endforeach()
  set(${root} "" PARENT_SCOPE)
  set(${version} "" PARENT_SCOPE)
endfunction()

function(cutlass_bn_find_torch root version)
  cutlass_bn_find_python_package(torch torch found_root found_version)
  if(NOT found_root)
    message(FATAL_ERROR "cutlass_bn: ${Python_EXECUTABLE} has no torch, whose headers the build needs. Install torch 2.11 or newer "
                        "there first, then build with `pip install .`. An environment that a tool makes for the build (uv and "
                        "python -m build do) never has torch: then `pip install --no-build-isolation .` builds in yours, with "
                        "scikit-build-core and nvidia-cutlass installed there as well.")
  endif()
  if(found_version VERSION_LESS 2.11)
    message(FATAL_ERROR "cutlass_bn: torch 2.11 or newer is needed, and ${Python_EXECUTABLE} has ${found_version}.")
  endif()
  message(STATUS "cutlass_bn: torch ${found_version} in ${found_root}")
  set(${root} "${found_root}" PARENT_SCOPE)
  set(${version} "${found_version}" PARENT_SCOPE)
endfunction()

function(cutlass_bn_find_cutlass dir root version)
  if(NOT dir)
    cutlass_bn_find_python_package(cutlass_library nvidia-cutlass package unused)
    if(package)
      set(dir "${package}/source")
    endif()
  endif()
  set(remedy "Install the headers with `pip install nvidia-cutlass==4.2.0.0`, or set CUTLASS_DIR to a CUTLASS checkout "
             "(CUTLASS_BN_CUDA=OFF makes a CPU-only build).")
  list(JOIN remedy "" remedy)
  set(header "${dir}/include/cutlass/version.h")
  if(NOT EXISTS "${header}")
    if(dir)
      message(FATAL_ERROR "cutlass_bn: no CUTLASS in CUTLASS_DIR=${dir} (there is no ${header}). ${remedy}")
    endif()
    message(FATAL_ERROR "cutlass_bn: CUTLASS was not found. ${remedy}")
  endif()
  file(STRINGS "${header}" lines REGEX "#define CUTLASS_(MAJOR|MINOR|PATCH) ")
  string(REGEX MATCHALL "[0-9]+" numbers "${lines}")
  list(JOIN numbers "." found_version)
  if(found_version VERSION_LESS 4.2)
    message(FATAL_ERROR "cutlass_bn: CUTLASS 4.2 or newer is needed, and ${dir} has ${found_version}. ${remedy}")
  endif()
  message(STATUS "cutlass_bn: CUTLASS ${found_version} in ${dir}")
  set(${root} "${dir}" PARENT_SCOPE)
  set(${version} "${found_version}" PARENT_SCOPE)
endfunction()
