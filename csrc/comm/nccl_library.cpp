#include "comm/nccl_library.h"

#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "shardcomm/error.h"
#include "shardcomm/nccl.h"

namespace shardcomm {
namespace nccl {
namespace {

constexpr const char* kName = "libnccl.so.2";

class Handle {
 public:
  Handle(const char* path, int flags) : handle_(dlopen(path, flags)) {}
  ~Handle() {
    if (handle_ != nullptr) dlclose(handle_);
  }
  Handle(Handle&& other) noexcept : handle_(std::exchange(other.handle_, nullptr)) {}
  Handle& operator=(Handle&&) = delete;

  explicit operator bool() const { return handle_ != nullptr; }
  template <class Function>
  bool find(const char* name, Function*& function) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    return function != nullptr;
  }
  // The library stays for the rest of the process.
  void keep() { handle_ = nullptr; }

 private:
  void* handle_;
};

std::string path_of(Result (*function)(int*), const char* asked) {
  Dl_info info{};
  const bool known =
      dladdr(reinterpret_cast<void*>(function), &info) != 0 && info.dli_fname != nullptr;
  return known ? info.dli_fname : asked;
}

// Fills in a library's functions, or says in `refusal` why it cannot be used.
std::optional<Library> use(const Handle& handle, const char* asked, std::string& refusal) {
  Library library;
  Result (*get_version)(int*) = nullptr;
  if (!handle.find("ncclGetVersion", get_version)) {
    refusal = std::string(asked) + " is not NCCL: it has no ncclGetVersion";
    return std::nullopt;
  }
  library.path = path_of(get_version, asked);
  if (get_version(&library.version) != kSuccess) {
    refusal = library.path + ": ncclGetVersion failed";
    return std::nullopt;
  }
  if (library.version < kOldest) {
    refusal = library.path + " is NCCL " + version_text(library.version) + "; " +
              version_text(kOldest) + " or newer is accepted";
    return std::nullopt;
  }

  std::string absent;
  const auto required = [&](const char* name, auto*& function) {
    if (!handle.find(name, function)) absent += std::string(absent.empty() ? "" : ", ") + name;
  };
  required("ncclGetUniqueId", library.get_unique_id);
  required("ncclCommInitRankConfig", library.comm_init_rank_config);
  required("ncclCommDestroy", library.comm_destroy);
  required("ncclCommAbort", library.comm_abort);
  required("ncclCommGetAsyncError", library.comm_get_async_error);
  required("ncclGetErrorString", library.get_error_string);
  required("ncclGetLastError", library.get_last_error);
  required("ncclGroupStart", library.group_start);
  required("ncclGroupEnd", library.group_end);
  required("ncclAllGather", library.all_gather);
  required("ncclReduceScatter", library.reduce_scatter);
  required("ncclAllReduce", library.all_reduce);
  required("ncclBroadcast", library.broadcast);
  required("ncclReduce", library.reduce);
  required("ncclSend", library.send);
  required("ncclRecv", library.recv);
  if (!absent.empty()) {
    refusal = library.path + " (NCCL " + version_text(library.version) + ") lacks " + absent;
    return std::nullopt;
  }

  const auto optional = [&](const char* name, int since, auto*& function) {
    if (!handle.find(name, function)) {
      library.missing.push_back(std::string(name) + " (" + version_text(since) + ")");
    }
  };
  optional("ncclMemAlloc", kBufferSince, library.mem_alloc);
  optional("ncclMemFree", kBufferSince, library.mem_free);
  optional("ncclCommRegister", kBufferSince, library.comm_register);
  optional("ncclCommDeregister", kBufferSince, library.comm_deregister);
  optional("ncclCommWindowRegister", kWindowSince, library.comm_window_register);
  optional("ncclCommWindowDeregister", kWindowSince, library.comm_window_deregister);
  return library;
}

// Never destroyed: threads that still watch a communicator when the process ends use it.
struct Loaded {
  std::mutex mutex;
  std::optional<Library> library;
};
Loaded& loaded() {
  static Loaded& instance = *std::make_unique<Loaded>().release();
  return instance;
}

// The caller holds the mutex. Returns why none was loaded.
std::string load(std::optional<Library>& library, const std::vector<std::string>& paths) {
  std::string refusals;
  const auto try_one = [&](const char* path, Handle handle) {
    std::string refusal;
    if (handle) {
      library = use(handle, path, refusal);
      if (library) handle.keep();
    } else {
      const char* error = dlerror();
      refusal = error != nullptr ? error : std::string(path) + " cannot be loaded";
    }
    if (!library) refusals += (refusals.empty() ? "" : "; ") + refusal;
  };
  Handle present(kName, RTLD_LAZY | RTLD_NOLOAD);
  if (present) {
    // A second copy would start threads and take memory of its own: this one, or none.
    try_one(kName, std::move(present));
    return refusals;
  }
  for (const std::string& path : paths) {
    try_one(path.c_str(), Handle(path.c_str(), RTLD_NOW | RTLD_LOCAL));
    if (library) return "";
  }
  try_one(kName, Handle(kName, RTLD_NOW | RTLD_LOCAL));
  return refusals;
}

}  // namespace

std::string version_text(int version) {
  // Until 2.8, X * 1000 + Y * 100 + Z.
  const int major = version < 10000 ? version / 1000 : version / 10000;
  const int minor = version < 10000 ? version % 1000 / 100 : version % 10000 / 100;
  const int patch = version % 100;
  const std::string text = std::to_string(major) + "." + std::to_string(minor);
  return patch == 0 ? text : text + "." + std::to_string(patch);
}

const Library& library() {
  const NcclStatus status = nccl_status();
  if (!status.available) throw CudaError("there is no NCCL to use: " + status.reason);
  return *loaded().library;  // and stays as it is
}

}  // namespace nccl

NcclStatus nccl_status(const std::vector<std::string>& paths) {
  nccl::Loaded& loaded = nccl::loaded();
  const std::lock_guard<std::mutex> lock(loaded.mutex);
  NcclStatus status;
  if (!loaded.library) status.reason = nccl::load(loaded.library, paths);
  if (loaded.library) {
    status.available = true;
    status.reason.clear();
    status.path = loaded.library->path;
    status.version = loaded.library->version;
    status.missing = loaded.library->missing;
  }
  return status;
}

}  // namespace shardcomm
