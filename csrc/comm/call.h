// What a rank has called, in a form that all ranks can read and compare.
#pragma once

#include <cstdint>
#include <string>

#include "comm/tag_names.h"
#include "shardcomm/coding.h"
#include "shardcomm/communicator.h"
#include "shardcomm/error.h"

namespace shardcomm {

enum class Op : std::uint8_t {
  attach,
  allocate,
  all_gather,
  reduce_scatter,
  all_reduce,
  broadcast,
  barrier,
  all_to_all,
  gather,
  scatter,
  reduce,
  send,
  recv
};
inline constexpr int kOps = static_cast<int>(Op::recv) + 1;

// Two ranks send and receive a message, and all call a collective.
constexpr bool is_message(Op op) { return op == Op::send || op == Op::recv; }

// Whether it moves or reduces what ranks have: programs ask for its receipt by its name.
constexpr bool is_collective(Op op) { return op >= Op::all_gather && op <= Op::reduce; }

constexpr const char* name(Op op) {
  switch (op) {
    case Op::attach:
      return "attach";
    case Op::allocate:
      return "allocate";
    case Op::all_gather:
      return "all_gather";
    case Op::reduce_scatter:
      return "reduce_scatter";
    case Op::all_reduce:
      return "all_reduce";
    case Op::broadcast:
      return "broadcast";
    case Op::barrier:
      return "barrier";
    case Op::all_to_all:
      return "all_to_all";
    case Op::gather:
      return "gather";
    case Op::scatter:
      return "scatter";
    case Op::reduce:
      return "reduce";
    case Op::send:
      return "send";
    case Op::recv:
      return "recv";
  }
  return "?";
}

// Where a buffer lies, as a peer can find it: an offset into a window that both map or, between
// threads, an address.
struct Place {
  static constexpr std::uint32_t kNowhere = 0;  // memory that only its own rank can reach
  static constexpr std::uint32_t kAddress = 1;
  std::uint32_t window = kNowhere;
  std::uint64_t offset = 0;

  bool reachable() const { return window != kNowhere; }
  bool in_window() const { return window > kAddress; }
  bool operator==(const Place& other) const {
    return window == other.window && offset == other.offset;
  }
};

// A call of a collective. It lies in shared memory, and so has plain data only.
struct Call {
  Op op = Op::barrier;
  DType send_dtype = DType::u8;
  DType recv_dtype = DType::u8;
  RedOp red_op = RedOp::sum;
  std::int32_t root = 0;  // send: the destination; recv: the source, or -1
  bool uneven = false;    // the ranks' parts differ in length
  // Not compared: the first chunk lies in this rank's staging area already.
  bool filled_first = false;
  bool from_root = false;    // not compared: its rank waits for the root alone
  std::uint16_t coding = 0;  // key_of(Coding): in what partial sums cross; 0: as they are
  // The elements of each rank, or of all uneven parts; for allocate and messages, bytes; for a
  // barrier the bytes whose writing the ranks share; for all_to_all 0, since ranks' numbers differ.
  std::int64_t count = 0;
  std::int64_t tag = 0;
  std::uint64_t sequence = 0;
  // These are not compared, since they may differ from rank to rank.
  Place send;
  Place recv;
  // allocate: how to find what rank 0 made; of uneven parts on several hosts, a digest of counts.
  std::uint64_t handle = 0;

  // Whether it has something that is not compared, and that other ranks want to know.
  bool tells_places() const { return send.reachable() || recv.reachable() || handle != 0; }
  bool same_as(const Call& other) const {
    return op == other.op && send_dtype == other.send_dtype && recv_dtype == other.recv_dtype &&
           red_op == other.red_op && root == other.root && uneven == other.uneven &&
           coding == other.coding && count == other.count && tag == other.tag;
  }
  // The same between hosts, whose uneven parts have digests.
  bool agrees_with(const Call& other) const {
    return same_as(other) && (!uneven || handle == other.handle);
  }
};

// What ranks must agree on of a Coding, in a number other than 0.
constexpr std::uint16_t key_of(const Coding& coding) {
  if (!coding.blocks.has_value()) return 1;
  const int code = 2 + static_cast<int>(coding.blocks->code);
  return static_cast<std::uint16_t>(coding.blocks->block << 8 | code);
}

// The fault of a rank that was in `call`; if the call has no number, of a rank in no call.
inline CommFault fault_in(const Call& call, const char* kind) {
  CommFault fault;
  fault.kind = kind;
  if (call.sequence > 0) {
    fault.operation = name(call.op);
    fault.sequence = call.sequence;
  }
  return fault;
}

// "all_gather(f32 to bf16, count 512, tag 3)" or, if its tag has a name,
// "all_gather(f32 to bf16, count 512) of unit 'blocks.3'"
std::string signature(const Call& call, const TagNames* names = nullptr);
// The same with the call's number: " #17".
std::string describe(const Call& call, const TagNames* names = nullptr);

}  // namespace shardcomm
