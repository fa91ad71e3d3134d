// DLPack's stable C interface (https://dmlc.github.io/dlpack/latest/c_api.html): its structures,
// and memory of the host as a capsule for torch.from_dlpack, a flat tensor of bytes.
//
// A tensor of torch.frombuffer takes the interpreter's lock when it goes. Threads of torch's, such
// as Gloo's, may be the last to drop one, and if the interpreter ends just then, the process ends
// with SIGABRT (see lock.h). A tensor of DLPack goes without the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "bindings/bindings.h"

namespace shardcomm::bindings {

namespace dlpack {

struct Device {
  std::int32_t type;
  std::int32_t id;
};
constexpr std::int32_t kHost = 1;

struct DataType {
  std::uint8_t code;
  std::uint8_t bits;
  std::uint16_t lanes;
};
constexpr std::uint8_t kInt = 0;
constexpr std::uint8_t kUnsigned = 1;
constexpr std::uint8_t kFloat = 2;
constexpr std::uint8_t kBfloat = 4;

struct Tensor {
  void* data;
  Device device;
  std::int32_t dims;
  DataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements
  std::uint64_t byte_offset;
};

// What a tensor's type has as `__dlpack_c_exchange_api__`, in version 1.
struct ExchangeApi {
  std::uint32_t major;
  std::uint32_t minor;
  const ExchangeApi* older;
  void (*allocate)();
  void (*export_managed)();
  void (*import_managed)();
  int (*read)(void* object, Tensor* tensor);  // -1 and a Python exception: it cannot be described
  void (*current_stream)();
};

}  // namespace dlpack

// `owner` goes with the tensor, on whatever thread that is.
py::capsule as_dlpack(void* data, std::size_t bytes, std::shared_ptr<void> owner);

}  // namespace shardcomm::bindings
