// A torch for CUDA has loaded an NCCL, and the core takes the one that is there. Here it sees none,
// and loads the fake one. The linker puts this in the place of dlopen (--wrap).
#include <dlfcn.h>

extern "C" void* __real_dlopen(const char* path, int mode);

extern "C" void* __wrap_dlopen(const char* path, int mode) {
  return (mode & RTLD_NOLOAD) != 0 ? nullptr : __real_dlopen(path, mode);
}
