# find_package(cutlass_bn) gives the target cutlass_bn::kernels: the launchers of csrc/batch_norm and csrc/linear_bn, without torch.
include(CMakeFindDependencyMacro)
find_dependency(CUDAToolkit)
include("${CMAKE_CURRENT_LIST_DIR}/cutlass_bn-targets.cmake")
