// shardcomm's collectives as XLA calls them: one handler of XLA's FFI over the C interface.
//
// shardcomm/interop/jax/library.py compiles this file against the headers of the jaxlib that is
// installed, and registers the two handlers at the end. JAX has threaded one token through all
// calls (the first argument and the first result of each), so XLA makes the calls of a rank one
// after another, in the order of the program.
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "shardcomm.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

struct Group {
  std::unique_ptr<shc_comm, void (*)(shc_comm*)> comm;
  int size;
  int device;
};

// The groups that this process has not closed, by the number that a compiled program has. A program
// may run after its group was closed, so no number is given twice. A call that runs while its group
// is closed holds the group until it returns.
class Groups {
 public:
  std::int64_t add(std::shared_ptr<const Group> group) {
    const std::lock_guard<std::mutex> lock(mutex_);
    open_.emplace(next_, std::move(group));
    return next_++;
  }

  std::shared_ptr<const Group> find(std::int64_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = open_.find(number);
    return found == open_.end() ? nullptr : found->second;
  }

  std::shared_ptr<const Group> take(std::int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto node = open_.extract(number);
    return node ? std::move(node.mapped()) : nullptr;
  }

  bool had(std::int64_t number) const {
    const std::lock_guard<std::mutex> lock(mutex_);
    return 0 <= number && number < next_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::int64_t, std::shared_ptr<const Group>> open_;
  std::int64_t next_ = 0;
};

// Never destroyed: when the process ends, XLA's threads may still be in calls.
Groups& groups() {
  static auto* const all = new Groups;
  return *all;
}

std::optional<shc_dtype> dtype_of(ffi::DataType type) {
  switch (type) {
    case ffi::U8:
      return SHC_U8;
    case ffi::S32:
      return SHC_I32;
    case ffi::S64:
      return SHC_I64;
    case ffi::F16:
      return SHC_F16;
    case ffi::BF16:
      return SHC_BF16;
    case ffi::F32:
      return SHC_F32;
    case ffi::F64:
      return SHC_F64;
    default:
      return std::nullopt;
  }
}

// The tag of a call that moves bytes for elements of `type`: ranks that call it with other elements
// of the same size have another tag. Its name, which errors say, has JAX's name of the dtype.
std::int64_t tag_of(const Group& group, bool is_broadcast, ffi::DataType type,
                    std::string_view dtype_name) {
  constexpr std::int64_t kFirst = std::int64_t{1} << 32;  // that can have a name
  constexpr std::int64_t kTypes = 256;
  const std::int64_t tag = kFirst + is_broadcast * kTypes + static_cast<std::int64_t>(type);
  const std::string name = (is_broadcast ? "a broadcast of " : "") + std::string(dtype_name);
  shc_comm_name_tag(group.comm.get(), tag, name.c_str());
  return tag;
}

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument(what); }

// `argument` is the shc_op of a reduce, and the root of a broadcast.
ffi::Error collective(shc_stream* stream, const Group& group, std::string_view operation,
                      std::int32_t argument, std::string_view dtype_name, ffi::AnyBuffer send,
                      ffi::AnyBuffer recv) {
  const auto dtype = dtype_of(send.element_type());
  const auto sent = static_cast<std::int64_t>(send.element_count());
  const auto received = static_cast<std::int64_t>(recv.element_count());
  const bool in_place = send.untyped_data() == recv.untyped_data();
  // Bytes stand for the elements of dtypes that the core does not know.
  const auto moved = dtype.value_or(SHC_U8);
  const auto count = dtype ? sent : static_cast<std::int64_t>(send.size_bytes());
  const auto op = static_cast<shc_op>(argument);
  shc_gather_options options = SHC_GATHER_OPTIONS_INIT;
  if (!dtype) {
    options.tag = tag_of(group, operation == "broadcast", send.element_type(), dtype_name);
  }
  shc_status status = SHC_OK;
  if (operation == "all_gather" && received == sent * group.size) {
    status = shc_all_gather(group.comm.get(), send.untyped_data(), moved, recv.untyped_data(),
                            moved, count, &options, stream);
  } else if (operation == "reduce_scatter" && sent == received * group.size && dtype) {
    status = shc_reduce_scatter(group.comm.get(), send.untyped_data(), *dtype, recv.untyped_data(),
                                *dtype, received, op, nullptr, stream);
  } else if (operation == "all_reduce" && in_place && dtype) {
    status = shc_all_reduce(group.comm.get(), recv.untyped_data(), *dtype, received, op, 0, stream);
  } else if (operation == "broadcast" && in_place) {
    // A broadcast has no tag, so the ranks compare it before. NCCL, on a stream, compares none.
    if (!dtype && stream == nullptr) status = shc_barrier(group.comm.get(), options.tag, nullptr);
    if (status == SHC_OK) {
      status = shc_broadcast(group.comm.get(), recv.untyped_data(), moved, count, argument, stream);
    }
  } else {
    return invalid(std::string(operation) + ": this program was compiled for another group");
  }
  if (status == SHC_OK) return ffi::Error::Success();
  const std::string text = shc_last_error_text();
  if (status == SHC_COMM_ERROR) return ffi::Error(ffi::ErrorCode::kAborted, text);
  return status == SHC_INVALID_ARGUMENT ? invalid(text) : ffi::Error::Internal(text);
}

// Why there is no group of this number.
ffi::Error missing(std::int64_t number, std::string_view operation) {
  if (groups().had(number)) {
    const char* const closed =
        ": this program was compiled for a communicator that this rank has closed; make another "
        "one, and give it as a static argument or call the jitted function's clear_cache()";
    return ffi::Error(ffi::ErrorCode::kAborted, std::string(operation) + closed);
  }
  return invalid(
      std::string(operation) +
      ": this process has no such communicator: the program was compiled in another one");
}

ffi::Error on_cpu(std::int64_t number, std::string_view operation, std::int32_t argument,
                  std::string_view dtype, ffi::Token, ffi::AnyBuffer send, ffi::Result<ffi::Token>,
                  ffi::Result<ffi::AnyBuffer> recv) {
  const auto group = groups().find(number);
  if (group == nullptr) return missing(number, operation);
  return collective(nullptr, *group, operation, argument, dtype, send, *recv);
}

// Queues the collective on the stream on which XLA computes, and returns.
ffi::Error on_cuda(void* cuda_stream, std::int32_t device, std::int64_t number,
                   std::string_view operation, std::int32_t argument, std::string_view dtype,
                   ffi::Token, ffi::AnyBuffer send, ffi::Result<ffi::Token>,
                   ffi::Result<ffi::AnyBuffer> recv) {
  const auto group = groups().find(number);
  if (group == nullptr) return missing(number, operation);
  if (device != group->device) {
    return invalid(std::string(operation) + ": this program runs on GPU " + std::to_string(device) +
                   ", and the communicator is on GPU " + std::to_string(group->device) +
                   "; let JAX compute there, by jax.default_device or CUDA_VISIBLE_DEVICES");
  }
  shc_stream* borrowed = nullptr;
  if (shc_stream_borrow_cuda(group->device, cuda_stream, &borrowed) != SHC_OK) {
    return ffi::Error::Internal(shc_last_error_text());
  }
  const std::unique_ptr<shc_stream, void (*)(shc_stream*)> stream(borrowed, shc_stream_destroy);
  return collective(stream.get(), *group, operation, argument, dtype, send, *recv);
}

}  // namespace

// Hands over `comm`, which shardcomm_jax_close gives back; returns the group's number.
extern "C" std::int64_t shardcomm_jax_add(shc_comm* comm, int size, int device) {
  return groups().add(std::make_shared<Group>(Group{{comm, shc_comm_destroy}, size, device}));
}

// What shc_comm_check says of the group; -1 if it was closed.
extern "C" int shardcomm_jax_check(std::int64_t number) {
  const auto group = groups().find(number);
  return group == nullptr ? -1 : shc_comm_check(group->comm.get());
}

// Leaves the group, whose calls end; the last of them gives back its memory. Again it does nothing.
extern "C" void shardcomm_jax_close(std::int64_t number) {
  const auto group = groups().take(number);
  if (group != nullptr) shc_comm_close(group->comm.get());
}

#define SHARDCOMM_JAX_OPERANDS             \
  Attr<std::int64_t>("comm")               \
      .Attr<std::string_view>("operation") \
      .Attr<std::int32_t>("argument")      \
      .Attr<std::string_view>("dtype")     \
      .Arg<ffi::Token>()                   \
      .Arg<ffi::AnyBuffer>()               \
      .Ret<ffi::Token>()                   \
      .Ret<ffi::AnyBuffer>()

XLA_FFI_DEFINE_HANDLER_SYMBOL(shardcomm_jax_on_cpu, on_cpu,
                              ffi::Ffi::Bind().SHARDCOMM_JAX_OPERANDS);
XLA_FFI_DEFINE_HANDLER_SYMBOL(shardcomm_jax_on_cuda, on_cuda,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<void*>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .SHARDCOMM_JAX_OPERANDS);
