// What is behind the opaque handles of the C interface.
#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi/arguments.h"
#include "abi/status.h"
#include "copy/bound_copy.h"
#include "shardcomm.h"
#include "shardcomm/communicator.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/layout.h"
#include "shardcomm/stream.h"
#include "stream/fork.h"

namespace shardcomm::abi {

// The first word of a handle says what it is, so that another handle in its place is refused, and
// mostly one that was destroyed, too. No handle begins as ordinary data does.
enum class Kind : std::uint32_t {
  layout = 0x5c0a7101,
  stream,
  event,
  copy_plan,
  copy,
  comm,
  memory,
  collective,
  schedule,
  request,
};

template <Kind kind>
class Handle {
 public:
  Handle() = default;
  ~Handle() { kind_ = Kind{}; }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  bool is_what_it_should_be() const { return kind_ == kind; }

 private:
  volatile Kind kind_ = kind;  // volatile: the last write is not left out
};

// The object behind a handle.
template <class Object>
Object& checked(Object* handle, const char* argument) {
  Object& object = required(handle, argument);
  if (object.is_what_it_should_be()) return object;
  throw std::invalid_argument(std::string(argument) +
                              " is not such a handle: it is of another kind, or was destroyed");
}

// Gives a new object to the caller, who destroys it by `destroy`.
template <class Object>
void hand_over(Object*& handle, std::unique_ptr<Object> object) {
  handle = object.release();
}

template <class Object>
void destroy(Object* handle) {
  if (handle == nullptr || !handle->is_what_it_should_be()) return;
  const Uncancelled uncancelled;
  delete handle;
}

constexpr int kHost = -1;

inline void check_device(int device) {
  if (device >= kHost) return;
  throw std::invalid_argument("device is " + std::to_string(device) +
                              "; it must be SHC_HOST or a CUDA device, counted from 0");
}

}  // namespace shardcomm::abi

struct shc_layout : shardcomm::abi::Handle<shardcomm::abi::Kind::layout> {
  shc_layout(std::vector<shardcomm::ParamExtent> given, int ranks, std::int64_t align,
             shardcomm::LayoutResult planned)
      : params(std::move(given)),
        world_size(ranks),
        align_elements(align),
        plan(std::move(planned)) {}

  std::vector<shardcomm::ParamExtent> params;
  int world_size;
  std::int64_t align_elements;
  shardcomm::LayoutResult plan;
};

struct shc_stream : shardcomm::abi::Handle<shardcomm::abi::Kind::stream> {
  shc_stream(std::shared_ptr<shardcomm::Stream> made, int on)
      : stream(std::move(made)), device(on) {}

  std::shared_ptr<shardcomm::Stream> stream;
  int device;
};

struct shc_event : shardcomm::abi::Handle<shardcomm::abi::Kind::event> {
  explicit shc_event(std::shared_ptr<shardcomm::Event> made) : event(std::move(made)) {}

  std::shared_ptr<shardcomm::Event> event;
};

struct shc_copy_plan : shardcomm::abi::Handle<shardcomm::abi::Kind::copy_plan> {
  explicit shc_copy_plan(std::shared_ptr<const shardcomm::CopyPlan> made) : plan(std::move(made)) {}

  std::shared_ptr<const shardcomm::CopyPlan> plan;
};

struct shc_copy : shardcomm::abi::Handle<shardcomm::abi::Kind::copy> {
  shc_copy(shardcomm::BoundCopy made, int on) : bound(std::move(made)), device(on) {}

  shardcomm::BoundCopy bound;
  int device;
};

struct shc_comm : shardcomm::abi::Handle<shardcomm::abi::Kind::comm> {
  shc_comm(std::shared_ptr<shardcomm::Communicator> made, int on)
      : comm(std::move(made)), device(on) {}

  std::shared_ptr<shardcomm::Communicator> comm;
  int device;
  int forks = shardcomm::forks();  // of the process that is the rank
};

struct shc_memory : shardcomm::abi::Handle<shardcomm::abi::Kind::memory> {
  explicit shc_memory(std::shared_ptr<shardcomm::Memory> made) : memory(std::move(made)) {}

  std::shared_ptr<shardcomm::Memory> memory;
};

struct shc_collective : shardcomm::abi::Handle<shardcomm::abi::Kind::collective> {
  shc_collective(shardcomm::Stream::Operation bound, int on)
      : operation(std::move(bound)), device(on) {}

  shardcomm::Stream::Operation operation;
  int device;
};

namespace shardcomm::abi {

// Runs what belongs to `device` on `given`; NULL is the calling thread or the device's default
// stream.
template <class Operation>
void run_on(shc_stream* given, int device, Operation&& operation) {
  if (given == nullptr && device == kHost) return operation(nullptr);
  if (given == nullptr) {
    const auto stream = borrow_cuda_stream(device, nullptr);
    return stream->enqueue(std::forward<Operation>(operation));
  }
  shc_stream& stream = checked(given, "stream");
  if (stream.device == device) return stream.stream->enqueue(std::forward<Operation>(operation));
  const auto place = [](int on) {
    return on == kHost ? std::string("the host") : "CUDA device " + std::to_string(on);
  };
  throw std::invalid_argument("stream is of " + place(stream.device) + ", and the work is on " +
                              place(device) + "; give a stream of the same device, or NULL");
}

}  // namespace shardcomm::abi
