// What each collective checks, and then calls of the C library. Every function checks its tensors
// now, and returns what is to be run later, on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "element_types.h"
#include "flat.h"
#include "shardcomm.hpp"

namespace shardcomm_torch {

using Tensors = std::vector<at::Tensor>;
using Call = std::function<void()>;

// ValueError in Python, of the sentence that the parts make.
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  throw std::invalid_argument(c10::str(parts...));
}

class Calls {
 public:
  Calls(shc_comm* comm, int rank, int size) : comm_(comm), rank_(rank), size_(size) {}

  // `outputs`: one tensor for all ranks, or one for each rank, of any sizes.
  Call all_gather(const char* name, const Tensors& outputs, const at::Tensor& input) const {
    check_alike(name, outputs, {input});
    const Moved type(input.scalar_type());
    std::vector<std::int64_t> counts;
    if (outputs.size() == 1) {
      check_whole(name, outputs[0].numel(), "the input", input.numel());
    } else {
      counts = numels(outputs, type.width);
      check_own(name, outputs, input);
    }
    const Flat recv(outputs);
    const Flat send = apart(Flat({input}), recv, own_begin(outputs, input));
    return [comm = comm_, recv, send, type, counts = std::move(counts)] {
      auto options = shc::gather_options();
      if (!counts.empty()) options.counts = counts.data();
      send.load();
      shc::check(shc_all_gather(comm, send.data(), type.dtype, recv.data(), type.dtype,
                                send.numel() * type.width, &options, nullptr));
      recv.store_anew();
    };
  }

  Call broadcast(const at::Tensor& tensor, std::int64_t root_rank) const {
    const int root = checked_root("broadcast", root_rank);
    const Moved type(tensor.scalar_type());
    return [comm = comm_, buffer = Flat({tensor}), type, root, is_root = root == rank_] {
      buffer.load();
      shc::check(shc_broadcast(comm, buffer.data(), type.dtype, buffer.numel() * type.width, root,
                               nullptr));
      if (!is_root) buffer.store();
    };
  }

  // `gathered`: a tensor for each rank, on the root alone.
  Call gather(const Tensors& gathered, const at::Tensor& input, std::int64_t root_rank) const {
    const int root = checked_root("gather", root_rank);
    const Moved type(input.scalar_type());
    const Flat send({input});
    const std::int64_t count = input.numel() * type.width;
    if (root != rank_) {
      return [comm = comm_, send, type, count, root] {
        send.load();
        shc::check(shc_gather(comm, send.data(), nullptr, type.dtype, count, root, 0, nullptr));
      };
    }
    check_parts("gather: gather_list", gathered, "the tensor", input);
    const Flat recv(gathered);
    return [comm = comm_, recv, type, count, root,
            send = apart(send, recv, own_begin(gathered, input))] {
      send.load();
      shc::check(shc_gather(comm, send.data(), recv.data(), type.dtype, count, root, 0, nullptr));
      recv.store_anew();
    };
  }

  // `parts`: a tensor for each rank, on the root alone.
  Call scatter(const at::Tensor& output, const Tensors& parts, std::int64_t root_rank) const {
    const int root = checked_root("scatter", root_rank);
    const Moved type(output.scalar_type());
    const Flat recv({output});
    const std::int64_t count = output.numel() * type.width;
    if (root != rank_) {
      return [comm = comm_, recv, type, count, root] {
        shc::check(shc_scatter(comm, nullptr, recv.data(), type.dtype, count, root, 0, nullptr));
        recv.store();
      };
    }
    check_parts("scatter: scatter_list", parts, "the tensor", output);
    return [comm = comm_, recv, type, count, root,
            send = apart(Flat(parts), recv, own_begin(parts, output))] {
      send.load();
      shc::check(shc_scatter(comm, send.data(), recv.data(), type.dtype, count, root, 0, nullptr));
      recv.store();
    };
  }

  // Rank r gets send_counts[r] elements of `inputs`, one after another, and `outputs` get
  // recv_counts[r] of rank r.
  Call all_to_all(const Tensors& outputs, std::vector<std::int64_t> recv_counts,
                  const Tensors& inputs, std::vector<std::int64_t> send_counts) const {
    check_alike("all_to_all", outputs, inputs);
    const Moved type(inputs.front().scalar_type());
    for (auto& count : recv_counts) count *= type.width;
    for (auto& count : send_counts) count *= type.width;
    const Flat recv(outputs);
    const Flat send(inputs);
    return [comm = comm_, recv, send = overlap(send, recv) ? send.copied() : send, type,
            recv_counts = std::move(recv_counts), send_counts = std::move(send_counts)] {
      send.load();
      shc::check(shc_all_to_all(comm, send.data(), send_counts.data(), recv.data(),
                                recv_counts.data(), type.dtype, 0, nullptr));
      recv.store();
    };
  }

  // In turn, as on every other rank. Tensors that share memory, as one that is named twice, are all
  // copied first, so that each is reduced once.
  Call all_reduce(const Tensors& tensors, const c10d::ReduceOp& reduce_op) const {
    const bool copied = tensors.size() > 1 && !are_apart(tensors);
    std::vector<std::pair<Flat, Reduced>> buffers;
    for (const at::Tensor& tensor : tensors) {
      check_alike("all_reduce", {tensor}, {tensor});
      buffers.emplace_back(Flat({tensor}, copied),
                           Reduced("all_reduce", reduce_op, tensor.scalar_type()));
    }
    return [comm = comm_, buffers = std::move(buffers)] {
      for (const auto& [buffer, type] : buffers) buffer.load();
      for (const auto& [buffer, type] : buffers) {
        shc::check(shc_all_reduce(comm, buffer.data(), type.dtype, buffer.numel() * type.width,
                                  type.op, 0, nullptr));
      }
      for (const auto& [buffer, type] : buffers) buffer.store();
    };
  }

  // Adds the ranks' sparse tensors in rank order, as Gloo does; each may have other indices.
  Call sparse_sum(const at::Tensor& tensor, const c10d::ReduceOp& op) const {
    if (op != c10d::ReduceOp::SUM) {
      refuse("all_reduce: a sparse tensor can be summed alone; op must be SUM");
    }
    Reduced("all_reduce", op, tensor.scalar_type());  // refuses what cannot be added
    return [*this, tensor] {
      const at::NoGradGuard no_grad;
      const at::Tensor own = tensor.coalesce();
      const at::Tensor entries = at::empty({size_}, at::kLong);
      all_gather("all_reduce", {entries}, at::full({1}, own._nnz(), at::kLong))();
      Tensors indices, values;
      for (int r = 0; r < size_; ++r) {
        const std::int64_t count = entries[r].item<std::int64_t>();
        auto shape = own._values().sizes().vec();
        shape[0] = count;
        indices.push_back(at::empty({tensor.sparse_dim(), count}, at::kLong));
        values.push_back(at::empty(shape, own._values().options()));
      }
      all_gather("all_reduce", indices, own._indices())();
      all_gather("all_reduce", values, own._values())();
      at::Tensor sum;
      for (std::size_t r = 0; r < indices.size(); ++r) {
        const auto part = at::_sparse_coo_tensor_unsafe(indices[r], values[r], tensor.sizes());
        part._coalesced_(true);
        sum = r == 0 ? part : sum + part;
      }
      tensor.copy_(sum);
    };
  }

  Call reduce(const at::Tensor& tensor, const c10d::ReduceOp& reduce_op,
              std::int64_t root_rank) const {
    const Reduced type("reduce", reduce_op, tensor.scalar_type());
    const int root = checked_root("reduce", root_rank);
    return [comm = comm_, buffer = Flat({tensor}), type, root, is_root = root == rank_] {
      buffer.load();
      shc::check(shc_reduce(comm, buffer.data(), is_root ? buffer.data() : nullptr, type.dtype,
                            buffer.numel() * type.width, type.op, root, 0, nullptr));
      if (is_root) buffer.store();
    };
  }

  // `inputs`: one tensor for all ranks, or one for each rank, of any sizes.
  Call reduce_scatter(const char* name, const at::Tensor& output, const Tensors& inputs,
                      const c10d::ReduceOp& reduce_op) const {
    check_alike(name, inputs, {output});
    const Reduced type("reduce_scatter", reduce_op, output.scalar_type());
    std::vector<std::int64_t> counts;
    if (inputs.size() == 1) {
      check_whole(name, inputs[0].numel(), "the output", output.numel());
    } else {
      counts = numels(inputs, type.width);
      check_own(name, inputs, output);
    }
    const Flat recv({output});
    const Flat send = apart(Flat(inputs), recv, own_begin(inputs, output));
    return [comm = comm_, recv, send, type, counts = std::move(counts)] {
      auto options = shc::reduce_options();
      if (!counts.empty()) options.counts = counts.data();
      send.load();
      shc::check(shc_reduce_scatter(comm, send.data(), type.dtype, recv.data(), type.dtype,
                                    recv.numel() * type.width, type.op, &options, nullptr));
      recv.store_anew();
    };
  }

  // ValueError unless there is one for each rank.
  template <class List>
  void check_length(const char* name, const List& list) const {
    if (list.size() == static_cast<std::size_t>(size_)) return;
    refuse(name, " has ", list.size(), " tensors; it must have one for each of ", size_, " ranks");
  }

  // How many elements each of `tensors` has, `width` for each of its own.
  static std::vector<std::int64_t> numels(const Tensors& tensors, std::int64_t width = 1) {
    std::vector<std::int64_t> counts;
    for (const at::Tensor& tensor : tensors) counts.push_back(tensor.numel() * width);
    return counts;
  }

 private:
  int checked_root(const char* operation, std::int64_t root) const {
    if (root >= 0 && root < size_) return static_cast<int>(root);
    refuse(operation, ": the root is rank ", root, " of the group; it must be 0 to ", size_ - 1);
  }

  static void check_alike(const char* name, const Tensors& some, const Tensors& others) {
    const at::ScalarType dtype = others.front().scalar_type();
    for (const Tensors* tensors : {&some, &others}) {
      for (const at::Tensor& tensor : *tensors) {
        if (tensor.scalar_type() == dtype && tensor.device().is_cpu()) continue;
        refuse(name, ": there are tensors of ", dtype, " on cpu and of ", tensor.scalar_type(),
               " on ", tensor.device(), "; all must have one dtype and be on the CPU");
      }
    }
  }

  void check_whole(const char* name, std::int64_t whole, const char* part_name,
                   std::int64_t part) const {
    if (whole == part * size_) return;
    refuse(name, " has ", whole, " elements, and ", part_name, " has ", part, "; with ", size_,
           " ranks it must have ", size_, " x ", part, " = ", size_ * part);
  }

  // `own`: what is this rank's of `parts`.
  void check_own(const char* name, const Tensors& parts, const at::Tensor& own) const {
    const std::int64_t numel = parts[static_cast<std::size_t>(rank_)].numel();
    if (numel == own.numel()) return;
    refuse(name, "[", rank_, "] has ", numel, " elements, and this rank's tensor has ", own.numel(),
           "; they must have as many");
  }

  void check_parts(const char* name, const Tensors& parts, const char* part_name,
                   const at::Tensor& part) const {
    check_length(name, parts);
    check_alike(name, parts, {part});
    for (const at::Tensor& each : parts) {
      if (each.numel() == part.numel()) continue;
      refuse(name, " has a tensor of ", each.numel(), " elements, and ", part_name, " has ",
             part.numel(), "; all must have as many");
    }
  }

  // Where this rank's part begins in `parts`, in bytes.
  std::size_t own_begin(const Tensors& parts, const at::Tensor& own) const {
    if (parts.size() == 1) return own.nbytes() * static_cast<std::size_t>(rank_);
    std::size_t begin = 0;
    for (int r = 0; r < rank_; ++r) begin += parts[static_cast<std::size_t>(r)].nbytes();
    return begin;
  }

  // `send`, copied if it overlaps `recv` otherwise than in place: where the one is the other's part
  // from `begin` bytes on.
  static Flat apart(const Flat& send, const Flat& recv, std::size_t begin) {
    const bool in_place = is_at(send, recv, begin) || is_at(recv, send, begin);
    return overlap(send, recv) && !in_place ? send.copied() : send;
  }

  shc_comm* comm_;
  int rank_;
  int size_;
};

}  // namespace shardcomm_torch
