// Communicators, their memory and their collectives, in C.
#include "shardcomm/communicator.h"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "abi/arguments.h"
#include "abi/collective.h"
#include "abi/handles.h"
#include "abi/meeting.h"
#include "abi/status.h"
#include "comm/call.h"
#include "comm/tag_names.h"
#include "shardcomm.h"
#include "shardcomm/coding.h"
#include "shardcomm/parts.h"
#include "shardcomm/reduce.h"
#include "stream/fork.h"

using shardcomm::BlockStats;
using shardcomm::Coding;
using shardcomm::Communicator;
using shardcomm::Epilogue;
using shardcomm::Op;
using shardcomm::Parts;
using shardcomm::abi::checked;
using shardcomm::abi::dtype_of;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over;
using shardcomm::abi::hand_over_bound;
using shardcomm::abi::op_of;
using shardcomm::abi::options_of;
using shardcomm::abi::required;
using shardcomm::abi::run_now_or_on;

namespace {

Parts parts_of(const shc_comm& comm, std::int64_t count, const int64_t* counts) {
  if (counts == nullptr) return Parts(count);
  const std::vector<std::int64_t> all(counts, counts + comm.comm->size());
  const auto own = all[static_cast<std::size_t>(comm.comm->rank())];
  if (own != count) {
    throw std::invalid_argument("count is " + std::to_string(count) + ", and options->counts[" +
                                std::to_string(comm.comm->rank()) + "], of this rank, is " +
                                std::to_string(own) + "; they must be the same");
  }
  return Parts(all);
}

// Calls use(send, send_dtype, recv, recv_dtype, parts, tag).
template <class Use>
auto with_gather(const shc_comm& comm, const void* send, shc_dtype send_dtype, void* recv,
                 shc_dtype recv_dtype, std::int64_t count, const shc_gather_options* options,
                 Use&& use) {
  const auto given = options_of("options", options, shc_gather_options SHC_GATHER_OPTIONS_INIT);
  return use(send, dtype_of(send_dtype, "send_dtype"), recv, dtype_of(recv_dtype, "recv_dtype"),
             parts_of(comm, count, given.counts), given.tag);
}

std::optional<Coding> coding_of(const shc_coding* given) {
  if (given == nullptr) return std::nullopt;
  Coding coding;
  if (given->blocks != nullptr) {
    coding.blocks = shardcomm::abi::format_of(given->blocks, "options->coding->blocks");
  }
  coding.stats = reinterpret_cast<BlockStats*>(given->stats);
  return coding;
}

// Calls use(coding, send, dtype, recv, epilogue, parts, op, tag).
template <class Use>
auto with_reduce(const shc_comm& comm, const void* send, shc_dtype send_dtype, void* recv,
                 shc_dtype recv_dtype, std::int64_t count, shc_op op,
                 const shc_reduce_options* options, Use&& use) {
  const auto given = options_of("options", options, shc_reduce_options SHC_REDUCE_OPTIONS_INIT);
  if (given.scale == 0.0f) {
    throw std::invalid_argument(
        "options->scale is 0, and so would be the result; begin the struct with "
        "SHC_REDUCE_OPTIONS_INIT");
  }
  const Epilogue epilogue{dtype_of(recv_dtype, "recv_dtype"), given.scale, given.accumulate != 0,
                          given.nonfinite};
  return use(coding_of(given.coding), send, dtype_of(send_dtype, "send_dtype"), recv, epilogue,
             parts_of(comm, count, given.counts), op_of(op), given.tag);
}

// In a forked child the core's abort and name_tag do nothing. This throws there, as other calls do.
Communicator& of_this_process(shc_comm* comm) {
  const shc_comm& known = checked(comm, "comm");
  if (known.forks != shardcomm::forks()) known.comm->check();
  return *known.comm;
}

}  // namespace

shc_status shc_get_unique_id(shc_transport transport, int size, shc_unique_id* id) {
  return guarded("shc_get_unique_id",
                 [&] { required(id, "id") = shardcomm::abi::begin_group(transport, size); });
}

shc_status shc_comm_init_rank(shc_comm** comm, int size, const shc_unique_id* id, int rank,
                              const shc_comm_options* options) {
  return guarded("shc_comm_init_rank", [&] {
    shc_comm*& result = required(comm, "comm");
    auto given = options_of("options", options, shc_comm_options SHC_COMM_OPTIONS_INIT);
    if (given.deadline_s == 0) given.deadline_s = shardcomm::CommOptions().deadline_s;
    if (!(given.deadline_s > 0)) {
      throw std::invalid_argument("options->deadline_s is " + std::to_string(given.deadline_s) +
                                  "; it must be a positive number of seconds, or 0 for 300");
    }
    hand_over(result, shardcomm::abi::join_group(required(id, "id"), rank, size, given));
  });
}

void shc_comm_destroy(shc_comm* comm) { shardcomm::abi::destroy(comm); }

shc_status shc_comm_rank(const shc_comm* comm, int* rank) {
  return guarded("shc_comm_rank",
                 [&] { required(rank, "rank") = checked(comm, "comm").comm->rank(); });
}

shc_status shc_comm_size(const shc_comm* comm, int* size) {
  return guarded("shc_comm_size",
                 [&] { required(size, "size") = checked(comm, "comm").comm->size(); });
}

shc_status shc_comm_abort(shc_comm* comm, const char* reason) {
  return guarded("shc_comm_abort",
                 [&] { of_this_process(comm).abort(&required(reason, "reason")); });
}

shc_status shc_comm_close(shc_comm* comm) {
  return guarded("shc_comm_close", [&] { checked(comm, "comm").comm->close(); });
}

shc_status shc_comm_check(const shc_comm* comm) {
  return guarded("shc_comm_check", [&] { checked(comm, "comm").comm->check(); });
}

shc_status shc_comm_name_tag(shc_comm* comm, int64_t tag, const char* name) {
  return guarded("shc_comm_name_tag", [&] {
    using shardcomm::TagNames;
    Communicator& known = of_this_process(comm);
    const char* given = &required(name, "name");
    if (tag < TagNames::kFirst || tag - TagNames::kFirst >= TagNames::kMost) {
      throw std::invalid_argument("tag is " + std::to_string(tag) + "; it must be 2^32 to 2^32 + " +
                                  std::to_string(TagNames::kMost - 1));
    }
    known.name_tag(tag, given);
  });
}

shc_status shc_comm_receipt(const shc_comm* comm, const char* operation, shc_receipt* receipt) {
  return guarded("shc_comm_receipt", [&] {
    const std::string wanted = &required(operation, "operation");
    for (const shardcomm::Receipt& kept : checked(comm, "comm").comm->receipts()) {
      if (kept.operation != wanted) continue;
      shc_receipt result = SHC_RECEIPT_INIT;
      result.sequence = kept.sequence;
      shardcomm::abi::copy_text(result.requested, kept.requested);
      shardcomm::abi::copy_text(result.taken, kept.taken);
      shardcomm::abi::copy_text(result.reason, kept.reason);
      shardcomm::abi::fill("receipt", receipt, result);
      return SHC_OK;
    }
    required(receipt, "receipt");
    std::string accepted;
    for (int op = 0; op < shardcomm::kOps; ++op) {
      if (!is_collective(static_cast<Op>(op))) continue;
      const std::string known = name(static_cast<Op>(op));
      if (wanted == known) return SHC_NOT_READY;
      accepted += (accepted.empty() ? "\"" : ", \"") + known + "\"";
    }
    throw std::invalid_argument("operation is \"" + wanted + "\"; accepted: " + accepted);
  });
}

shc_status shc_allocate(shc_comm* comm, size_t bytes, shc_use use, shc_memory** memory,
                        void** data) {
  return guarded("shc_allocate", [&] {
    shc_memory*& result = required(memory, "memory");
    void*& address = required(data, "data");
    if (use != SHC_GATHER && use != SHC_REDUCE) {
      throw std::invalid_argument("use is " + std::to_string(static_cast<int>(use)) +
                                  "; accepted: SHC_GATHER, SHC_REDUCE");
    }
    auto made = std::make_unique<shc_memory>(
        checked(comm, "comm")
            .comm->allocate(bytes,
                            use == SHC_GATHER ? shardcomm::Use::gather : shardcomm::Use::reduce));
    address = made->memory->data();
    hand_over(result, std::move(made));
  });
}

void shc_memory_destroy(shc_memory* memory) { shardcomm::abi::destroy(memory); }

shc_status shc_all_gather(shc_comm* comm, const void* send, shc_dtype send_dtype, void* recv,
                          shc_dtype recv_dtype, int64_t count, const shc_gather_options* options,
                          shc_stream* stream) {
  return guarded("shc_all_gather", [&] {
    const shc_comm& known = checked(comm, "comm");
    with_gather(known, send, send_dtype, recv, recv_dtype, count, options,
                [&](const auto&... args) {
                  run_now_or_on(
                      stream, known, [&] { known.comm->all_gather(args...); },
                      [&] { return Communicator::bind_all_gather(known.comm, args...); });
                });
  });
}

shc_status shc_bind_all_gather(shc_comm* comm, const void* send, shc_dtype send_dtype, void* recv,
                               shc_dtype recv_dtype, int64_t count,
                               const shc_gather_options* options, shc_collective** collective) {
  return hand_over_bound("shc_bind_all_gather", comm, collective, [&](const shc_comm& known) {
    return with_gather(
        known, send, send_dtype, recv, recv_dtype, count, options,
        [&](const auto&... args) { return Communicator::bind_all_gather(known.comm, args...); });
  });
}

shc_status shc_reduce_scatter(shc_comm* comm, const void* send, shc_dtype send_dtype, void* recv,
                              shc_dtype recv_dtype, int64_t count, shc_op op,
                              const shc_reduce_options* options, shc_stream* stream) {
  return guarded("shc_reduce_scatter", [&] {
    const shc_comm& known = checked(comm, "comm");
    with_reduce(known, send, send_dtype, recv, recv_dtype, count, op, options,
                [&](const std::optional<Coding>& coding, const auto&... args) {
                  const auto bind = [&] {
                    return Communicator::bind_reduce_scatter(known.comm, args..., coding);
                  };
                  if (stream == nullptr && coding.has_value()) return bind()(nullptr);
                  run_now_or_on(stream, known, [&] { known.comm->reduce_scatter(args...); }, bind);
                });
  });
}

shc_status shc_bind_reduce_scatter(shc_comm* comm, const void* send, shc_dtype send_dtype,
                                   void* recv, shc_dtype recv_dtype, int64_t count, shc_op op,
                                   const shc_reduce_options* options, shc_collective** collective) {
  return hand_over_bound("shc_bind_reduce_scatter", comm, collective, [&](const shc_comm& known) {
    return with_reduce(known, send, send_dtype, recv, recv_dtype, count, op, options,
                       [&](const std::optional<Coding>& coding, const auto&... args) {
                         return Communicator::bind_reduce_scatter(known.comm, args..., coding);
                       });
  });
}

shc_status shc_all_reduce(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count, shc_op op,
                          int64_t tag, shc_stream* stream) {
  return guarded("shc_all_reduce", [&] {
    const shc_comm& known = checked(comm, "comm");
    const auto type = dtype_of(dtype, "dtype");
    const auto with = op_of(op);
    run_now_or_on(
        stream, known, [&] { known.comm->all_reduce(buffer, type, count, with, tag); },
        [&] { return Communicator::bind_all_reduce(known.comm, buffer, type, count, with, tag); });
  });
}

shc_status shc_bind_all_reduce(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count,
                               shc_op op, int64_t tag, shc_collective** collective) {
  return hand_over_bound("shc_bind_all_reduce", comm, collective, [&](const shc_comm& known) {
    return Communicator::bind_all_reduce(known.comm, buffer, dtype_of(dtype, "dtype"), count,
                                         op_of(op), tag);
  });
}

shc_status shc_broadcast(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count, int root,
                         shc_stream* stream) {
  return guarded("shc_broadcast", [&] {
    const shc_comm& known = checked(comm, "comm");
    const auto type = dtype_of(dtype, "dtype");
    run_now_or_on(
        stream, known, [&] { known.comm->broadcast(buffer, type, count, root); },
        [&] { return Communicator::bind_broadcast(known.comm, buffer, type, count, root); });
  });
}

shc_status shc_bind_broadcast(shc_comm* comm, void* buffer, shc_dtype dtype, int64_t count,
                              int root, shc_collective** collective) {
  return hand_over_bound("shc_bind_broadcast", comm, collective, [&](const shc_comm& known) {
    return Communicator::bind_broadcast(known.comm, buffer, dtype_of(dtype, "dtype"), count, root);
  });
}

shc_status shc_barrier(shc_comm* comm, int64_t tag, shc_stream* stream) {
  return guarded("shc_barrier", [&] {
    const shc_comm& known = checked(comm, "comm");
    run_now_or_on(
        stream, known, [&] { known.comm->barrier(tag); },
        [&] { return Communicator::bind_barrier(known.comm, tag); });
  });
}

shc_status shc_bind_barrier(shc_comm* comm, int64_t tag, shc_collective** collective) {
  return hand_over_bound("shc_bind_barrier", comm, collective, [&](const shc_comm& known) {
    return Communicator::bind_barrier(known.comm, tag);
  });
}

shc_status shc_start(const shc_collective* collective, shc_stream* stream) {
  return guarded("shc_start", [&] {
    const shc_collective& bound = checked(collective, "collective");
    shardcomm::abi::run_on(stream, bound.device, bound.operation);
  });
}

void shc_collective_destroy(shc_collective* collective) { shardcomm::abi::destroy(collective); }
