// shardcomm in C++17: shardcomm.h with destructors, exceptions and element types. Everything is
// here, inline; a program links the same library as a C program does.
//
//   shc::UniqueId id = ...;                       // shc::unique_id(SHC_SHM, size) on rank 0
//   shc::Comm comm(size, id, rank);
//   shc::Buffer<float> full(comm, size * count, SHC_GATHER);
//   comm.all_gather(shard.data(), full.data(), count);
//
// Functions mean what the functions of shardcomm.h mean, where each is documented. They throw
// shc::Error, or std::invalid_argument for what this header itself refuses. Objects are moved and
// not copied, as std::unique_ptr is. Block formats, deadlines and wait checks have no classes:
// shc::check(shc_set_deadline(1)).
#ifndef SHARDCOMM_HPP_
#define SHARDCOMM_HPP_

#if __cplusplus < 201703L
#error "shardcomm.hpp needs C++17 or newer (-std=c++17); shardcomm.h serves every C++"
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "shardcomm.h"

namespace shc {

class Error : public std::runtime_error {
 public:
  // The calling thread's last error.
  static Error last() {
    shc_error error = SHC_ERROR_INIT;
    shc_last_error(&error);
    return Error(error);
  }

  shc_status status() const { return status_; }
  // For SHC_COMM_ERROR, as in shc_error.
  const std::string& kind() const { return kind_; }
  int rank() const { return rank_; }
  int reporter() const { return reporter_; }
  const std::string& operation() const { return operation_; }
  std::uint64_t sequence() const { return sequence_; }

 private:
  explicit Error(const shc_error& error)
      : std::runtime_error(error.text),
        status_(error.status),
        kind_(error.kind),
        rank_(error.rank),
        reporter_(error.reporter),
        operation_(error.operation),
        sequence_(error.sequence) {}

  shc_status status_;
  std::string kind_;
  int rank_;
  int reporter_;
  std::string operation_;
  std::uint64_t sequence_;
};

inline void check(shc_status status) {
  if (status == SHC_NOT_READY) {  // the last error would be an older one
    throw std::invalid_argument("shc::check: SHC_NOT_READY is no error; call shc::is_ready");
  }
  if (status != SHC_OK) throw Error::last();
}

// False for SHC_NOT_READY.
inline bool is_ready(shc_status status) {
  if (status == SHC_NOT_READY) return false;
  check(status);
  return true;
}

// The element type of T. Specialise it for 16-bit floats: SHC_F16 for __half, for example.
template <class T>
struct ElementType {
  static_assert(sizeof(T) == 0,
                "T is no element type: std::uint8_t, std::int8_t, std::int32_t, std::int64_t, "
                "float and double are; specialise shc::ElementType for 16-bit floats");
  static constexpr shc_dtype value = SHC_U8;
};
template <>
struct ElementType<std::uint8_t> {
  static constexpr shc_dtype value = SHC_U8;
};
template <>
struct ElementType<std::int8_t> {
  static constexpr shc_dtype value = SHC_I8;
};
template <>
struct ElementType<std::int32_t> {
  static constexpr shc_dtype value = SHC_I32;
};
template <>
struct ElementType<std::int64_t> {
  static constexpr shc_dtype value = SHC_I64;
};
template <>
struct ElementType<float> {
  static constexpr shc_dtype value = SHC_F32;
};
template <>
struct ElementType<double> {
  static constexpr shc_dtype value = SHC_F64;
};

template <class T>
std::size_t bytes_of(std::int64_t count) {
  if (count < 0 || count > std::numeric_limits<std::int64_t>::max() / std::int64_t{sizeof(T)}) {
    throw std::invalid_argument("shc: count is " + std::to_string(count) + ", of elements of " +
                                std::to_string(sizeof(T)) + " bytes");
  }
  return static_cast<std::size_t>(count) * sizeof(T);
}

template <class T>
std::size_t message_bytes(std::int64_t count) {
  static_assert(std::is_trivially_copyable_v<T>,
                "T has more than its bytes, which are all that a message carries");
  return bytes_of<T>(count);
}

// A handle that destroys itself.
template <class T, void (*destroy)(T*)>
class Handle {
 public:
  T* get() const { return handle_.get(); }

 protected:
  explicit Handle(T* handle) : handle_(handle) {}

 private:
  struct Destroy {
    void operator()(T* handle) const { destroy(handle); }
  };
  std::unique_ptr<T, Destroy> handle_;
};

// Calls `make(&handle)`, checks its status, and returns the handle.
template <class T, class Make>
T* made(Make&& make) {
  T* handle = nullptr;
  check(make(&handle));
  return handle;
}

class Event : public Handle<shc_event, shc_event_destroy> {
 public:
  explicit Event(shc_event* event) : Handle(event) {}

  bool query() const { return is_ready(shc_event_query(get())); }
  // False if the event has not fired within `timeout_s` seconds; negative: waits without end.
  bool wait(double timeout_s = -1) const { return is_ready(shc_event_wait(get(), timeout_s)); }
};

class Stream : public Handle<shc_stream, shc_stream_destroy> {
 public:
  // A worker thread.
  Stream() : Handle(made<shc_stream>(shc_stream_create_thread)) {}
  Stream(int device, void* cuda_stream)
      : Handle(made<shc_stream>(
            [&](auto* stream) { return shc_stream_borrow_cuda(device, cuda_stream, stream); })) {}

  Event record() const {
    return Event(made<shc_event>([&](auto* event) { return shc_stream_record(get(), event); }));
  }
  void wait(const Event& event) const { check(shc_stream_wait(get(), event.get())); }
};

// The stream of a call; null: now, in the calling thread, or the default stream of a device.
inline shc_stream* native(const Stream* stream) {
  return stream == nullptr ? nullptr : stream->get();
}

class Collective : public Handle<shc_collective, shc_collective_destroy> {
 public:
  explicit Collective(shc_collective* bound) : Handle(bound) {}
  void operator()(const Stream* stream = nullptr) const { check(shc_start(get(), native(stream))); }
};

// A send or a receive that was started. Its buffer must be valid until it has ended or is
// destroyed, which cancels it.
class Request : public Handle<shc_request, shc_request_destroy> {
 public:
  explicit Request(shc_request* request) : Handle(request) {}

  bool test() const { return is_ready(shc_request_test(get())); }
  // False if it has not ended within `timeout_s` seconds; negative: waits until the deadline.
  bool wait(double timeout_s = -1) const { return is_ready(shc_request_wait(get(), timeout_s)); }
  // The rank that sent; for a send the destination. Nothing: a receive from any source has not
  // ended.
  std::optional<int> source() const {
    int rank = 0;
    if (!is_ready(shc_request_source(get(), &rank))) return std::nullopt;
    return rank;
  }
};

using UniqueId = shc_unique_id;

inline UniqueId unique_id(shc_transport transport, int size) {
  UniqueId id;
  check(shc_get_unique_id(transport, size, &id));
  return id;
}

inline shc_comm_options comm_options() { return SHC_COMM_OPTIONS_INIT; }
inline shc_gather_options gather_options() { return SHC_GATHER_OPTIONS_INIT; }
inline shc_reduce_options reduce_options() { return SHC_REDUCE_OPTIONS_INIT; }
inline shc_copy_options copy_options() { return SHC_COPY_OPTIONS_INIT; }

class Comm : public Handle<shc_comm, shc_comm_destroy> {
 public:
  Comm(int size, const UniqueId& id, int rank, const shc_comm_options& options = comm_options())
      : Handle(made<shc_comm>(
            [&](auto* comm) { return shc_comm_init_rank(comm, size, &id, rank, &options); })),
        rank_(rank),
        size_(size) {}
  // This rank in a group of several hosts.
  Comm(const Comm& on_host, const shc_across& across, int host, int hosts)
      : Handle(made<shc_comm>([&](auto* comm) {
          return shc_comm_init_hosts(comm, on_host.get(), &across, host, hosts);
        })),
        rank_(host * on_host.size() + on_host.rank()),
        size_(hosts * on_host.size()) {}
  Comm(const Comm& on_host, const int* sockets, int host, int hosts)
      : Handle(made<shc_comm>([&](auto* comm) {
          return shc_comm_init_hosts_over_sockets(comm, on_host.get(), sockets, host, hosts);
        })),
        rank_(host * on_host.size() + on_host.rank()),
        size_(hosts * on_host.size()) {}

  int rank() const { return rank_; }
  int size() const { return size_; }

  template <class Send, class Recv>
  void all_gather(const Send* send, Recv* recv, std::int64_t count, const Stream* stream = nullptr,
                  const shc_gather_options& options = gather_options()) const {
    check(shc_all_gather(get(), send, ElementType<Send>::value, recv, ElementType<Recv>::value,
                         count, &options, native(stream)));
  }
  template <class Send, class Recv>
  Collective bind_all_gather(const Send* send, Recv* recv, std::int64_t count,
                             const shc_gather_options& options = gather_options()) const {
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_all_gather(get(), send, ElementType<Send>::value, recv,
                                 ElementType<Recv>::value, count, &options, bound);
    }));
  }

  template <class Send, class Recv>
  void reduce_scatter(const Send* send, Recv* recv, std::int64_t count, shc_op op = SHC_SUM,
                      const Stream* stream = nullptr,
                      const shc_reduce_options& options = reduce_options()) const {
    check(shc_reduce_scatter(get(), send, ElementType<Send>::value, recv, ElementType<Recv>::value,
                             count, op, &options, native(stream)));
  }
  template <class Send, class Recv>
  Collective bind_reduce_scatter(const Send* send, Recv* recv, std::int64_t count,
                                 shc_op op = SHC_SUM,
                                 const shc_reduce_options& options = reduce_options()) const {
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_reduce_scatter(get(), send, ElementType<Send>::value, recv,
                                     ElementType<Recv>::value, count, op, &options, bound);
    }));
  }

  template <class T>
  void all_reduce(T* buffer, std::int64_t count, shc_op op = SHC_SUM,
                  const Stream* stream = nullptr, std::int64_t tag = 0) const {
    check(shc_all_reduce(get(), buffer, ElementType<T>::value, count, op, tag, native(stream)));
  }
  template <class T>
  Collective bind_all_reduce(T* buffer, std::int64_t count, shc_op op = SHC_SUM,
                             std::int64_t tag = 0) const {
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_all_reduce(get(), buffer, ElementType<T>::value, count, op, tag, bound);
    }));
  }

  template <class T>
  void broadcast(T* buffer, std::int64_t count, int root = 0,
                 const Stream* stream = nullptr) const {
    check(shc_broadcast(get(), buffer, ElementType<T>::value, count, root, native(stream)));
  }
  template <class T>
  Collective bind_broadcast(T* buffer, std::int64_t count, int root = 0) const {
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_broadcast(get(), buffer, ElementType<T>::value, count, root, bound);
    }));
  }

  void barrier(const Stream* stream = nullptr, std::int64_t tag = 0) const {
    check(shc_barrier(get(), tag, native(stream)));
  }
  Collective bind_barrier(std::int64_t tag = 0) const {
    return Collective(
        made<shc_collective>([&](auto* bound) { return shc_bind_barrier(get(), tag, bound); }));
  }

  // Elements to and from each rank, one number a rank.
  template <class T>
  void all_to_all(const T* send, const std::vector<std::int64_t>& send_counts, T* recv,
                  const std::vector<std::int64_t>& recv_counts, const Stream* stream = nullptr,
                  std::int64_t tag = 0) const {
    require_counts(send_counts, recv_counts);
    check(shc_all_to_all(get(), send, send_counts.data(), recv, recv_counts.data(),
                         ElementType<T>::value, tag, native(stream)));
  }
  template <class T>
  Collective bind_all_to_all(const T* send, const std::vector<std::int64_t>& send_counts, T* recv,
                             const std::vector<std::int64_t>& recv_counts,
                             std::int64_t tag = 0) const {
    require_counts(send_counts, recv_counts);
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_all_to_all(get(), send, send_counts.data(), recv, recv_counts.data(),
                                 ElementType<T>::value, tag, bound);
    }));
  }

  // `count` elements of each rank.
  template <class T>
  void gather(const T* send, T* recv, std::int64_t count, int root = 0,
              const Stream* stream = nullptr, std::int64_t tag = 0) const {
    check(shc_gather(get(), send, recv, ElementType<T>::value, count, root, tag, native(stream)));
  }
  template <class T>
  Collective bind_gather(const T* send, T* recv, std::int64_t count, int root = 0,
                         std::int64_t tag = 0) const {
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_gather(get(), send, recv, ElementType<T>::value, count, root, tag, bound);
    }));
  }

  template <class T>
  void scatter(const T* send, T* recv, std::int64_t count, int root = 0,
               const Stream* stream = nullptr, std::int64_t tag = 0) const {
    check(shc_scatter(get(), send, recv, ElementType<T>::value, count, root, tag, native(stream)));
  }
  template <class T>
  Collective bind_scatter(const T* send, T* recv, std::int64_t count, int root = 0,
                          std::int64_t tag = 0) const {
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_scatter(get(), send, recv, ElementType<T>::value, count, root, tag, bound);
    }));
  }

  template <class T>
  void reduce(const T* send, T* recv, std::int64_t count, shc_op op = SHC_SUM, int root = 0,
              const Stream* stream = nullptr, std::int64_t tag = 0) const {
    check(
        shc_reduce(get(), send, recv, ElementType<T>::value, count, op, root, tag, native(stream)));
  }
  template <class T>
  Collective bind_reduce(const T* send, T* recv, std::int64_t count, shc_op op = SHC_SUM,
                         int root = 0, std::int64_t tag = 0) const {
    return Collective(made<shc_collective>([&](auto* bound) {
      return shc_bind_reduce(get(), send, recv, ElementType<T>::value, count, op, root, tag, bound);
    }));
  }

  // Messages of `count` objects, which travel as bytes. `source` may be SHC_ANY_SOURCE.
  template <class T>
  void send(const T* buffer, std::int64_t count, int destination, std::int64_t tag = 0) const {
    check(shc_send(get(), buffer, message_bytes<T>(count), destination, tag));
  }
  // Returns the rank that sent.
  template <class T>
  int recv(T* buffer, std::int64_t count, int source, std::int64_t tag = 0) const {
    int sender = 0;
    check(shc_recv(get(), buffer, message_bytes<T>(count), source, tag, &sender));
    return sender;
  }
  template <class T>
  Request isend(const T* buffer, std::int64_t count, int destination, std::int64_t tag = 0) const {
    return Request(made<shc_request>([&](auto* request) {
      return shc_isend(get(), buffer, message_bytes<T>(count), destination, tag, request);
    }));
  }
  template <class T>
  Request irecv(T* buffer, std::int64_t count, int source, std::int64_t tag = 0) const {
    return Request(made<shc_request>([&](auto* request) {
      return shc_irecv(get(), buffer, message_bytes<T>(count), source, tag, request);
    }));
  }
  // What Request::get() of the one that has ended returns; null: none has within `timeout_s`
  // seconds, or wake_any was called.
  shc_request* wait_any(double timeout_s = -1) const {
    shc_request* ended = nullptr;
    is_ready(shc_wait_any(get(), timeout_s, &ended));
    return ended;
  }
  void wake_any() const { check(shc_wake_any(get())); }

  void abort(const std::string& reason) const { check(shc_comm_abort(get(), reason.c_str())); }
  void close() const { check(shc_comm_close(get())); }
  void check_alive() const { check(shc_comm_check(get())); }
  void name_tag(std::int64_t tag, const std::string& name) const {
    check(shc_comm_name_tag(get(), tag, name.c_str()));
  }
  // Nothing: there was no collective of this kind yet.
  std::optional<shc_receipt> receipt(const std::string& operation) const {
    shc_receipt receipt = SHC_RECEIPT_INIT;
    if (!is_ready(shc_comm_receipt(get(), operation.c_str(), &receipt))) return std::nullopt;
    return receipt;
  }

 private:
  void require_counts(const std::vector<std::int64_t>& sent,
                      const std::vector<std::int64_t>& received) const {
    const auto ranks = static_cast<std::size_t>(size_);
    if (sent.size() == ranks && received.size() == ranks) return;
    throw std::invalid_argument("shc::Comm::all_to_all: send_counts has " +
                                std::to_string(sent.size()) + " numbers and recv_counts " +
                                std::to_string(received.size()) + "; each must have " +
                                std::to_string(size_) + ", one for each rank");
  }

  int rank_;
  int size_;
};

// Communication memory of `count` elements, zero-filled. Making it is collective.
template <class T>
class Buffer : public Handle<shc_memory, shc_memory_destroy> {
 public:
  Buffer(const Comm& comm, std::int64_t count, shc_use use) : Buffer(allocate(comm, count, use)) {}

  T* data() const { return data_; }
  std::int64_t size() const { return count_; }
  T* begin() const { return data_; }
  T* end() const { return data_ + count_; }
  T& operator[](std::int64_t index) const { return data_[index]; }

 private:
  struct Allocated {
    shc_memory* memory = nullptr;
    void* data = nullptr;
    std::int64_t count = 0;
  };
  static Allocated allocate(const Comm& comm, std::int64_t count, shc_use use) {
    Allocated made;
    made.count = count;
    check(shc_allocate(comm.get(), bytes_of<T>(count), use, &made.memory, &made.data));
    return made;
  }
  explicit Buffer(const Allocated& made)
      : Handle(made.memory), data_(static_cast<T*>(made.data)), count_(made.count) {}

  T* data_;
  std::int64_t count_;
};

class Layout : public Handle<shc_layout, shc_layout_destroy> {
 public:
  Layout(const std::vector<shc_param>& params, int world_size, std::int64_t align_elements = 1)
      : Layout(made<shc_layout>([&](auto* layout) {
          return shc_layout_plan(params.data(), params.size(), world_size, align_elements, layout);
        })) {}
  static Layout deserialize(const std::string& text) {
    return Layout(made<shc_layout>(
        [&](auto* layout) { return shc_layout_deserialize(text.c_str(), layout); }));
  }

  std::string serialize() const {
    std::size_t bytes = 0;
    check(shc_layout_serialize(get(), nullptr, &bytes));
    std::string text(bytes, '\0');
    check(shc_layout_serialize(get(), text.data(), &bytes));
    text.resize(bytes - 1);
    return text;
  }
  std::size_t param_count() const {
    std::size_t count = 0;
    check(shc_layout_param_count(get(), &count));
    return count;
  }
  int world_size() const {
    int size = 0;
    check(shc_layout_world_size(get(), &size));
    return size;
  }
  std::int64_t shard_elements() const {
    std::int64_t elements = 0;
    check(shc_layout_shard_elements(get(), &elements));
    return elements;
  }
  std::int64_t offset(std::size_t param) const {
    std::int64_t offset = 0;
    check(shc_layout_offset(get(), param, &offset));
    return offset;
  }
  shc_piece piece(std::size_t param, int rank) const {
    shc_piece piece;
    check(shc_layout_piece(get(), param, rank, &piece));
    return piece;
  }

 private:
  explicit Layout(shc_layout* layout) : Handle(layout) {}
};

class CopyPlan : public Handle<shc_copy_plan, shc_copy_plan_destroy> {
 public:
  CopyPlan(const std::vector<shc_segment>& segments, shc_dtype src_dtype, shc_dtype dst_dtype)
      : Handle(made<shc_copy_plan>([&](auto* plan) {
          return shc_copy_plan_create(segments.data(), segments.size(), src_dtype, dst_dtype, plan);
        })) {}
};

class Copy : public Handle<shc_copy, shc_copy_destroy> {
 public:
  // One pointer for each of the plan's operands.
  Copy(const CopyPlan& plan, const std::vector<const void*>& sources,
       const std::vector<void*>& destinations, int threads = 1, int device = SHC_HOST)
      : Handle(made<shc_copy>([&](auto* copy) {
          require_operands(plan, sources.size(), destinations.size());
          return shc_copy_bind(plan.get(), sources.data(), destinations.data(), threads, device,
                               copy);
        })) {}
  void operator()(const Stream* stream = nullptr,
                  const shc_copy_options& options = copy_options()) const {
    check(shc_copy_run(get(), &options, native(stream)));
  }

 private:
  static void require_operands(const CopyPlan& plan, std::size_t sources,
                               std::size_t destinations) {
    std::size_t from = 0;
    std::size_t to = 0;
    check(shc_copy_plan_operands(plan.get(), &from, &to));
    if (from == sources && to == destinations) return;
    throw std::invalid_argument("shc::Copy: the plan has " + std::to_string(from) +
                                " sources and " + std::to_string(to) + " destinations; there are " +
                                std::to_string(sources) + " and " + std::to_string(destinations) +
                                " pointers");
  }
};

// What a training framework does at each of its triggers, and when.
class Schedule : public Handle<shc_schedule, shc_schedule_destroy> {
 public:
  // `json` is what `shardcomm.Schedule.to_json()` has written.
  static Schedule parse(const std::string& json) {
    return Schedule(made<shc_schedule>(
        [&](auto* schedule) { return shc_schedule_parse(json.c_str(), schedule); }));
  }

  std::size_t unit_count() const {
    std::size_t count = 0;
    check(shc_schedule_unit_count(get(), &count));
    return count;
  }
  std::size_t slot_count() const {
    std::size_t count = 0;
    check(shc_schedule_slot_count(get(), &count));
    return count;
  }
  int slot_of(std::size_t unit) const {
    int slot = 0;
    check(shc_schedule_slot_of(get(), unit, &slot));
    return slot;
  }
  // The actions of a trigger, in the order of issue. `unit` is -1 for SHC_END_OF_BACKWARD.
  std::vector<shc_action> actions(shc_phase phase, int unit) const {
    const shc_action* first = nullptr;
    std::size_t count = 0;
    check(shc_schedule_actions(get(), phase, unit, &first, &count));
    return {first, first + count};
  }

 private:
  explicit Schedule(shc_schedule* schedule) : Handle(schedule) {}
};

}  // namespace shc

#endif  // SHARDCOMM_HPP_
