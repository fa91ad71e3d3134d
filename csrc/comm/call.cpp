#include "comm/call.h"

namespace shardcomm {
namespace {

// ", bf16 between hosts", of a key other than 0.
std::string between_hosts(std::uint16_t key) {
  if (key == 0) return "";
  if (key == key_of({})) return ", bf16 between hosts";
  const bool is_int8 = (key & 0xff) == 2 + static_cast<int>(BlockCode::mxint8);
  return std::string(is_int8 ? ", mxint8" : ", mxfp8") + " in blocks of " +
         std::to_string(key >> 8) + " between hosts";
}

std::string arguments(const Call& call) {
  const std::string count =
      "count " + std::to_string(call.count) + (call.uneven ? " in uneven parts" : "");
  const std::string dtype = name(call.send_dtype);
  switch (call.op) {
    case Op::all_gather:
      if (call.send_dtype == call.recv_dtype) return dtype + ", " + count;
      return dtype + " to " + name(call.recv_dtype) + ", " + count;
    case Op::reduce_scatter:
    case Op::all_reduce:
      return dtype + ", " + count + ", " + name(call.red_op) + between_hosts(call.coding);
    case Op::reduce:
      return dtype + ", " + count + ", " + name(call.red_op) + ", root " +
             std::to_string(call.root);
    case Op::gather:
    case Op::scatter:
    case Op::broadcast:
      return dtype + ", " + count + ", root " + std::to_string(call.root);
    case Op::all_to_all:
      return dtype;
    case Op::allocate:
      return std::to_string(call.count) + " bytes, " +
             (call.root == static_cast<std::int32_t>(Use::gather) ? "gather" : "reduce");
    case Op::send:
      return std::to_string(call.count) + " bytes to rank " + std::to_string(call.root);
    case Op::recv:
      return std::to_string(call.count) + " bytes from " +
             (call.root < 0 ? "any rank" : "rank " + std::to_string(call.root));
    case Op::barrier:
      return call.count == 0 ? "" : std::to_string(call.count) + " shared bytes";
    case Op::attach:
      return "";
  }
  return "";
}

}  // namespace

std::string signature(const Call& call, const TagNames* names) {
  std::string given = arguments(call);
  const std::string of = names == nullptr ? "" : names->of(call.tag);
  if ((call.tag != 0 || is_message(call.op)) && of.empty()) {
    given += (given.empty() ? "tag " : ", tag ") + std::to_string(call.tag);
  }
  return std::string(name(call.op)) + "(" + given + ")" + (of.empty() ? "" : " of " + of);
}

std::string describe(const Call& call, const TagNames* names) {
  return signature(call, names) + " #" + std::to_string(call.sequence);
}

}  // namespace shardcomm
