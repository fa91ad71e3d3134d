// Memory that NCCL allocates or knows of. After allocator.cc, register/register.cc, and,
// since 2.28, dev_runtime.cc.
#include "fake_nccl/comm.h"

namespace fake_nccl {
namespace {

// Memory that ncclMemAlloc gave, which 2.27 wants of a window (aligned to 2 MiB).
struct Allocated {
  std::mutex mutex;
  std::set<const void*> all;
};
Allocated& allocated() {
  static Allocated& instance = *std::make_unique<Allocated>().release();
  return instance;
}

bool contains(const char* begin, std::size_t size, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  return begin <= at && at + bytes <= begin + size;
}

// ncclRegister: a range that is registered already gets the same handle once more.
void* register_range(Comm* comm, void* data, std::size_t bytes) {
  if (!comm->local_register) return nullptr;
  const std::lock_guard<std::mutex> lock(comm->mutex);
  for (auto& [handle, each] : comm->registrations) {
    if (!contains(each->data, each->bytes, data, bytes)) continue;
    ++each->uses;
    return handle;
  }
  auto made = std::make_unique<Registration>(Registration{static_cast<char*>(data), bytes});
  void* handle = made.get();
  comm->registrations[handle] = std::move(made);
  return handle;
}

// commDeregister
Result deregister(Comm* comm, void* handle) {
  if (handle == nullptr) return success;
  const std::lock_guard<std::mutex> lock(comm->mutex);
  const auto found = comm->registrations.find(handle);
  if (found == comm->registrations.end()) return invalid_usage;
  if (--found->second->uses == 0) comm->registrations.erase(found);
  return success;
}

void add_window(Comm* comm, void* key, Window window) {
  if (window.symmetric) count(&FakeNcclCounts::windows_symmetric);
  const std::lock_guard<std::mutex> lock(comm->mutex);
  comm->windows[key] = std::move(window);
}

// What a symmetric registration does with the other ranks: each has its own part, and then a
// barrier (bootstrapIntraNodeAllGather in 2.27; symMemoryObtain and bootstrapBarrier since 2.28).
Result agree_on_window(Comm* comm) {
  return meet(comm, {"window " + std::to_string(comm->windows_made++)}, comm->size());
}

// ncclDevrWindowRegisterInGroup of 2.28 and later.
Result register_in_group(Comm* comm, void* data, std::size_t bytes, void** out) {
  void* local = register_range(comm, data, bytes);
  if (!comm->symmetric) {
    count(&FakeNcclCounts::windows_local);
    __atomic_store_n(out, local, __ATOMIC_RELEASE);
    return success;
  }
  if (const Result agreed = agree_on_window(comm)) {
    deregister(comm, local);
    return agreed;
  }
  Window window;
  window.data = static_cast<char*>(data);
  window.bytes = bytes;
  window.symmetric = true;
  window.local = local;
  void* key = window.on_device = fake::allocate(64);
  add_window(comm, key, std::move(window));
  __atomic_store_n(out, key, __ATOMIC_RELEASE);
  return success;
}

// register/register.cc of 2.27: a window structure around the local registration, there when the
// call returns. Nothing tells whether it is more than that.
Result register_window_2_27(Comm* comm, void* data, std::size_t bytes, void** out) {
  *out = nullptr;
  if (!known(comm)) return invalid_argument;
  const InCall call(comm);
  group_start();
  Result result = fault_of(FakeCall::window_register, comm->rank);
  if (result == success && comm->local_register) result = ensure_ready(comm);
  bool fits = false;  // else "does not satisfy symmetric registration requirements", and null
  {
    const std::lock_guard<std::mutex> lock(allocated().mutex);
    fits = comm->cumem && allocated().all.count(data) > 0;
  }
  if (result == success && comm->local_register && fits) {
    Window window;
    window.data = static_cast<char*>(data);
    window.bytes = bytes;
    window.local = register_range(comm, data, bytes);
    window.structure = std::make_unique<char>();
    void* key = *out = window.structure.get();
    add_window(comm, key, std::move(window));
    if (!comm->symmetric) {
      count(&FakeNcclCounts::windows_local);
    } else {
      join_group(comm);
      group().job->windows.push_back({comm, [comm, key] {
                                        if (const Result failed = agree_on_window(comm)) {
                                          return failed;
                                        }
                                        count(&FakeNcclCounts::windows_symmetric);
                                        const std::lock_guard<std::mutex> lock(comm->mutex);
                                        comm->windows[key].symmetric = true;
                                        return success;
                                      }});
    }
  }
  group_error(result);
  return group_end();
}

// dev_runtime.cc: the window is null until the group has registered it, and a group that is in
// progress is success to the caller.
Result register_window_2_28(Comm* comm, void* data, std::size_t bytes, void** out) {
  if (!known(comm)) return invalid_argument;
  if (kWithoutSymmetry == WithoutSymmetry::null) {
    *out = nullptr;
    if (data == nullptr || bytes == 0) return invalid_argument;
  }
  if (const Result fault = fault_of(FakeCall::window_register, comm->rank)) return fault;
  if (!comm->symmetric && kWithoutSymmetry == WithoutSymmetry::null) return success;
  if (data == nullptr || bytes == 0 || !(comm->symmetric || comm->local_register)) {
    return success;  // 2.28 leaves *out as it is
  }
  if (instant()) {
    *out = register_range(comm, data, bytes);
    return success;
  }
  const InCall call(comm);
  group_start();
  const Result result = ensure_ready(comm);
  if (result == success) {
    join_group(comm);
    group().job->windows.push_back(
        {comm, [=] { return register_in_group(comm, data, bytes, out); }});
  }
  group_error(result);
  const Result ended = group_end();
  return ended != success && ended != in_progress ? ended : result;
}

}  // namespace

bool in_window(Comm* comm, const void* data, std::size_t bytes) {
  const std::lock_guard<std::mutex> lock(comm->mutex);
  for (const auto& [_, window] : comm->windows) {
    if (window.symmetric && contains(window.data, window.bytes, data, bytes)) return true;
  }
  return false;
}

// In a capture NCCL registers what it can (NCCL_GRAPH_REGISTER; transport/p2p.cc,
// ipcRegisterBuffer): what was made by CUDA's memory API, as NCCL's own memory is and the caller's
// is played to be, and neither pools nor cudaMalloc.
bool is_registered(Comm* comm, const void* data, std::size_t bytes, bool captured) {
  if (bytes <= kMostByLl) return false;
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    for (const auto& [_, each] : comm->registrations) {
      if (contains(each->data, each->bytes, data, bytes)) return true;
    }
  }
  cudaPointerAttributes attributes;
  cudaPointerGetAttributes(&attributes, data);
  return captured && comm->cumem && attributes.type == cudaMemoryTypeUnregistered;
}

bool has_registrations(Comm* comm) {
  const std::lock_guard<std::mutex> lock(comm->mutex);
  return !comm->registrations.empty() || !comm->windows.empty();
}

void forget_registrations(Comm* comm) {
  std::map<void*, Window> windows;
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    windows.swap(comm->windows);
    comm->registrations.clear();
  }
  for (const auto& [_, window] : windows) fake::release(window.on_device);
}

}  // namespace fake_nccl

using namespace fake_nccl;

extern "C" {

Result ncclMemAlloc(void** data, std::size_t bytes) {
  if (const Result fault = fault_of(FakeCall::mem_alloc, fake::current_device)) return fault;
  if (bytes > std::size_t{1} << 40) return static_cast<Result>(1);  // ncclUnhandledCudaError
  *data = fake::allocate(bytes);
  const std::lock_guard<std::mutex> lock(allocated().mutex);
  allocated().all.insert(*data);
  return success;
}

Result ncclMemFree(void* data) {
  {
    const std::lock_guard<std::mutex> lock(allocated().mutex);
    allocated().all.erase(data);
  }
  if (!faults().cumem) return cudaFree(data) == cudaSuccess ? success : static_cast<Result>(1);
  fake::release(data);
  return success;
}

// Local: no other rank is asked.
Result ncclCommRegister(Comm* comm, void* data, std::size_t bytes, void** handle) {
  if (!known(comm)) return invalid_argument;
  const InCall call(comm);
  if (const Result fault = fault_of(FakeCall::comm_register, comm->rank)) return fault;
  *handle = register_range(comm, data, bytes);
  if (*handle != nullptr) count(&FakeNcclCounts::registrations_local);
  return success;
}

Result ncclCommDeregister(Comm* comm, void* handle) {
  if (!known(comm)) return invalid_argument;
  const InCall call(comm);
  const Result result = deregister(comm, handle);
  if (result != success) count(&FakeNcclCounts::bad_arguments);
  return result;
}

Result ncclCommWindowRegister(Comm* comm, void* data, std::size_t bytes, void** out, int) {
  return kVersion < 22800 ? register_window_2_27(comm, data, bytes, out)
                          : register_window_2_28(comm, data, bytes, out);
}

// Local in every version.
Result ncclCommWindowDeregister(Comm* comm, void* key) {
  if (key == nullptr) return success;
  if (!known(comm)) return invalid_argument;
  const InCall call(comm);
  Window window;
  {
    const std::lock_guard<std::mutex> lock(comm->mutex);
    const auto found = comm->windows.find(key);
    if (found != comm->windows.end()) {
      window = std::move(found->second);
      comm->windows.erase(found);
    }
  }
  fake::release(window.on_device);
  // Not a window: the local registration's handle, which 2.28 gives.
  const bool is_window = window.data != nullptr;
  const Result result = deregister(comm, is_window ? window.local : key);
  if (result != success) count(&FakeNcclCounts::bad_arguments);
  return result;
}

}  // extern "C"
