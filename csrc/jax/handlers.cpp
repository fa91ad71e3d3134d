// shardcomm's collectives as XLA calls them: one handler of XLA's FFI over the C interface.
//
// shardcomm/interop/jax/library.py compiles this file against the headers of the jaxlib that is
// installed, and registers the two handlers at the end. JAX has threaded one token through all
// calls (the first argument and the first result of each), so XLA makes the calls of a rank one
// after another, in the order of the program.
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>

#include "shardcomm.h"
#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

struct Group {
  shc_comm* comm;
  int size;
  int device;
};

// The groups of this process, by the number that a compiled program has. Nobody takes a group out
// again, and nobody destroys its communicator: a program may run after the communicator was closed,
// and then gets its error.
constexpr std::size_t kMostGroups = 1 << 16;
Group groups[kMostGroups];
std::atomic<std::size_t> known_groups{0};  // released after the group is written, acquired before

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

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument(what); }

// `argument` is the shc_op of a reduce, and the root of a broadcast.
ffi::Error collective(shc_stream* stream, const Group& group, std::string_view operation,
                      std::int32_t argument, ffi::AnyBuffer send, ffi::AnyBuffer recv) {
  const auto dtype = dtype_of(send.element_type());
  const auto sent = static_cast<std::int64_t>(send.element_count());
  const auto received = static_cast<std::int64_t>(recv.element_count());
  const bool in_place = send.untyped_data() == recv.untyped_data();
  // Bytes stand for the elements of dtypes that the core does not know.
  const auto moved = dtype.value_or(SHC_U8);
  const auto count = dtype ? sent : static_cast<std::int64_t>(send.size_bytes());
  const auto op = static_cast<shc_op>(argument);
  shc_status status = SHC_OK;
  if (operation == "all_gather" && received == sent * group.size) {
    status = shc_all_gather(group.comm, send.untyped_data(), moved, recv.untyped_data(), moved,
                            count, nullptr, stream);
  } else if (operation == "reduce_scatter" && sent == received * group.size && dtype) {
    status = shc_reduce_scatter(group.comm, send.untyped_data(), *dtype, recv.untyped_data(),
                                *dtype, received, op, nullptr, stream);
  } else if (operation == "all_reduce" && in_place && dtype) {
    status = shc_all_reduce(group.comm, recv.untyped_data(), *dtype, received, op, 0, stream);
  } else if (operation == "broadcast" && in_place) {
    status = shc_broadcast(group.comm, recv.untyped_data(), moved, count, argument, stream);
  } else {
    return invalid(std::string(operation) + ": this program was compiled for another group");
  }
  if (status == SHC_OK) return ffi::Error::Success();
  const std::string text = shc_last_error_text();
  if (status == SHC_COMM_ERROR) return ffi::Error(ffi::ErrorCode::kAborted, text);
  return status == SHC_INVALID_ARGUMENT ? invalid(text) : ffi::Error::Internal(text);
}

const Group* find(std::int64_t number) {
  const auto known = static_cast<std::int64_t>(known_groups.load(std::memory_order_acquire));
  return number >= 0 && number < known ? &groups[number] : nullptr;
}

const char* const kUnknown =
    "this process has no such communicator: the program was compiled in another one";

ffi::Error on_cpu(std::int64_t number, std::string_view operation, std::int32_t argument,
                  ffi::Token, ffi::AnyBuffer send, ffi::Result<ffi::Token>,
                  ffi::Result<ffi::AnyBuffer> recv) {
  const Group* group = find(number);
  if (group == nullptr) return invalid(kUnknown);
  return collective(nullptr, *group, operation, argument, send, *recv);
}

// Queues the collective on the stream on which XLA computes, and returns.
ffi::Error on_cuda(void* cuda_stream, std::int32_t device, std::int64_t number,
                   std::string_view operation, std::int32_t argument, ffi::Token,
                   ffi::AnyBuffer send, ffi::Result<ffi::Token>, ffi::Result<ffi::AnyBuffer> recv) {
  const Group* group = find(number);
  if (group == nullptr) return invalid(kUnknown);
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
  return collective(stream.get(), *group, operation, argument, send, *recv);
}

}  // namespace

// Makes a group known to the handlers; returns its number, or -1 if there are too many.
extern "C" std::int64_t shardcomm_jax_add(shc_comm* comm, int size, int device) {
  static std::mutex adding;
  const std::lock_guard<std::mutex> lock(adding);
  const std::size_t number = known_groups.load();
  if (number == kMostGroups) return -1;
  groups[number] = {comm, size, device};
  known_groups.store(number + 1, std::memory_order_release);
  return static_cast<std::int64_t>(number);
}

#define SHARDCOMM_JAX_OPERANDS             \
  Attr<std::int64_t>("comm")               \
      .Attr<std::string_view>("operation") \
      .Attr<std::int32_t>("argument")      \
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
