// What combines the ranks' values, over NCCL: reduce_scatter and all_reduce.
#include <array>
#include <stdexcept>
#include <string>

#include "comm/buffer.h"
#include "comm/nccl_communicator.h"
#include "copy/reduce_cuda.h"

namespace shardcomm {
namespace {

constexpr int kMostExchanged = 256;  // sources of reduce_cuda

nccl::DataType nccl_dtype(DType dtype) {
  switch (dtype) {
    case DType::u8:
      return nccl::kUint8;
    case DType::i32:
      return nccl::kInt32;
    case DType::i64:
      return nccl::kInt64;
    case DType::f16:
      return nccl::kFloat16;
    case DType::bf16:
      return nccl::kBfloat16;
    case DType::f32:
      return nccl::kFloat32;
    case DType::f64:
      return nccl::kFloat64;
  }
  throw std::invalid_argument("this dtype is not one of NCCL's");
}

nccl::Reduction nccl_reduction(RedOp op) {
  switch (op) {
    case RedOp::sum:
      return nccl::kSum;
    case RedOp::avg:
      return nccl::kAvg;
    case RedOp::max:
      return nccl::kMax;
    case RedOp::min:
      return nccl::kMin;
  }
  throw std::invalid_argument("this reduction is not one of NCCL's");
}

// Where NCCL's result may not be ours: it rounds 16-bit floats at every addition, and does not say
// how it rounds the average of integers.
bool sums_otherwise(DType dtype, RedOp op) {
  if (op != RedOp::sum && op != RedOp::avg) return false;
  const bool integer = !is_convertible(dtype) && dtype != DType::f64;
  return itemsize(dtype) == 2 || (integer && op == RedOp::avg);
}

}  // namespace

void NcclCommunicator::reduce_scatter(const void* send, DType dtype, void* recv,
                                      const Epilogue& epilogue, std::int64_t count, RedOp op,
                                      std::int64_t tag, NativeStream native) {
  static constexpr Path kExchanged{
      "nccl", "exchange",
      "nccl: it would accumulate 16-bit floats in 16 bits, and average integers as it likes: the "
      "ranks exchange their slices, and each reduces its own"};
  static constexpr Path kTooMany{"exchange", "nccl",
                                 "nccl: more than 256 ranks, which is as many as one kernel "
                                 "reduces: accumulated by NCCL, in the buffer's dtype"};
  check_buffer("reduce_scatter", "send", send, count);
  check_buffer("reduce_scatter", "recv", recv, count);
  check_epilogue(epilogue, dtype);
  Call call;
  call.op = Op::reduce_scatter;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  call.tag = tag;
  const bool otherwise = sums_otherwise(dtype, op);
  const bool exchanged = otherwise && rank_.size <= kMostExchanged;
  const Path& path = exchanged ? kExchanged : otherwise ? kTooMany : kDirect;
  if (count == 0) return skip(session_->reduces, call, path);
  run(session_->reduces, call, native, path, [&](cudaStream_t stream) {
    if (exchanged) {
      exchange(call, send, recv, epilogue, stream);
    } else {
      reduce(call, send, recv, epilogue, stream);
    }
  });
}

void NcclCommunicator::reduce(const Call& call, const void* send, void* recv,
                              const Epilogue& epilogue, cudaStream_t stream) {
  const DType dtype = call.send_dtype;
  const auto into = [&](void* reduced) {
    session_->reduces.call(call, [&](nccl::Comm comm) {
      return nccl_.reduce_scatter(send, reduced, static_cast<std::size_t>(call.count),
                                  nccl_dtype(dtype), nccl_reduction(call.red_op), comm, stream);
    });
  };
  // NCCL has no epilogue. Ours is a reduction of its result alone; in place, where nothing is left
  // to do but to look for NaN and Inf.
  const auto finish = [&](const void* reduced) {
    reduce_cuda(recv, epilogue, &reduced, 1, dtype, RedOp::sum, rank_.size, call.count, stream);
  };
  if (epilogue.dtype == dtype && epilogue.scale == 1.0f && !epilogue.accumulate) {
    into(recv);
    if (epilogue.nonfinite != nullptr) finish(recv);
    return;
  }
  const Scratch reduced(scratch_, bytes_of(call.count, dtype), stream);
  into(reduced.data());
  finish(reduced.data());
}

// Each rank gets all ranks' versions of its own slice and sums them in rank order, so the result is
// the same bit for bit from run to run. It moves as many bytes as a ring does.
void NcclCommunicator::exchange(const Call& call, const void* send, void* recv,
                                const Epilogue& epilogue, cudaStream_t stream) {
  const DType dtype = call.send_dtype;
  const std::size_t bytes = bytes_of(call.count, dtype);
  const Scratch received(scratch_, bytes * static_cast<std::size_t>(rank_.size - 1), stream);
  std::array<const void*, kMostExchanged> sources{};
  sources[static_cast<std::size_t>(rank_.rank)] = at(send, rank_.rank * call.count, dtype);
  session_->reduces.call(call, [&](nccl::Comm comm) {
    nccl::Result failed = nccl::kSuccess;
    const auto note = [&failed](nccl::Result result) {
      const bool good = result == nccl::kSuccess || result == nccl::kInProgress;
      if (!good && failed == nccl::kSuccess) failed = result;
    };
    nccl_.group_start();
    for (int i = 1; i < rank_.size; ++i) {
      const int to = (rank_.rank + i) % rank_.size;
      const int from = (rank_.rank - i + rank_.size) % rank_.size;
      void* slot = at(received.data(), (i - 1) * call.count, dtype);
      sources[static_cast<std::size_t>(from)] = slot;
      note(nccl_.send(at(send, to * call.count, dtype), bytes, nccl::kUint8, to, comm, stream));
      note(nccl_.recv(slot, bytes, nccl::kUint8, from, comm, stream));
    }
    const nccl::Result ended = nccl_.group_end();
    return failed == nccl::kSuccess ? ended : failed;
  });
  reduce_cuda(recv, epilogue, sources.data(), rank_.size, dtype, call.red_op, rank_.size, call.count,
              stream);
}

void NcclCommunicator::all_reduce(void* buffer, DType dtype, std::int64_t count, RedOp op,
                                  NativeStream native) {
  static constexpr Path kNarrow{"nccl", "nccl",
                                "nccl: it accumulates in the buffer's dtype, 16-bit floats in 16 "
                                "bits, and averages integers as it likes"};
  check_buffer("all_reduce", "buffer", buffer, count);
  Call call;
  call.op = Op::all_reduce;
  call.send_dtype = call.recv_dtype = dtype;
  call.red_op = op;
  call.count = count;
  const Path& path = sums_otherwise(dtype, op) ? kNarrow : kDirect;
  if (count == 0) return skip(session_->reduces, call, path);
  run(session_->reduces, call, native, path, [&](cudaStream_t stream) {
    session_->reduces.call(call, [&](nccl::Comm comm) {
      return nccl_.all_reduce(buffer, buffer, static_cast<std::size_t>(count), nccl_dtype(dtype),
                              nccl_reduction(op), comm, stream);
    });
  });
}

}  // namespace shardcomm
