// The backend "shardcomm" of torch.distributed: collectives on CPU tensors, through shared memory.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Utils.hpp>
#include <utility>
#include <vector>

#include "calls.h"
#include "group.h"
#include "make_group.h"
#include "monitored_barrier.h"
#include "premultiplied.h"

namespace shardcomm_torch {

class Backend final : public c10d::Backend {
 public:
  // Arguments: see Group's constructor.
  Backend(int rank, int size, std::chrono::milliseconds timeout, shc_comm* comm,
          c10::intrusive_ptr<c10d::Backend> gloo, std::string reason)
      : c10d::Backend(rank, size),
        group_(rank, c10::make_intrusive<Options>("shardcomm", timeout), comm, std::move(gloo),
               std::move(reason)),
        calls_(comm, rank, size) {}

  const std::string getBackendName() const override { return "shardcomm"; }
  // Returns a copy, because torch writes the options of a new sub-group into it.
  c10::intrusive_ptr<Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(*group_.options);
  }
  void setTimeout(std::chrono::milliseconds timeout) override { group_.set_timeout(timeout); }
  void setSequenceNumberForGroup() override {}  // all ranks begin at 0
  std::uint64_t getSequenceNumberForGroup() override { return group_.sequence(); }

  bool supportsSplitting() const override { return true; }
  // A group of `ranks` of this one, in their order. Null: this rank is not among them.
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& opts) override {
    const auto own = std::find(ranks.begin(), ranks.end(), getRank());
    if (own == ranks.end()) return nullptr;
    return make_group(store, static_cast<int>(own - ranks.begin()), static_cast<int>(ranks.size()),
                      opts->timeout);
  }
  // Makes one group of all ranks that use `store`, also of ranks that are in different groups now.
  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<Options>& opts, const int& rank,
                                          const int& size) override {
    return make_group(store, rank, size, opts->timeout);
  }

  void abort() override { group_.abort(); }
  void shutdown() override { group_.shutdown(); }
  void close() { group_.close(); }
  void leave() { group_.leave(); }
  std::vector<Receipt> receipts() { return group_.receipts(); }

  // Torch calls it when nobody has the group any more. Its destructor waits for weak pointers, too,
  // as those of module.cpp.
  void release_resources() override { group_.end(); }

  WorkPointer allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                        const c10d::AllgatherOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("all_gather")) {
      return gloo->allgather(outputs, inputs, opts);
    }
    const Tensors& gathered = only("all_gather: tensor_list", outputs);
    calls_.check_length("all_gather: tensor_list", gathered);
    return group_.begin(
        group_.gathers, opts, {c10d::OpType::ALLGATHER, "shardcomm:all_gather"}, inputs, gathered,
        calls_.all_gather("all_gather: tensor_list", gathered, only("all_gather: tensor", inputs)));
  }

  WorkPointer _allgather_base(at::Tensor& output, at::Tensor& input,
                              const c10d::AllgatherOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("all_gather_into_tensor")) {
      return gloo->_allgather_base(output, input, opts);
    }
    return group_.begin(group_.gathers, opts,
                        {c10d::OpType::_ALLGATHER_BASE, "shardcomm:all_gather"}, {input}, {output},
                        calls_.all_gather("all_gather_into_tensor: output", {output}, input));
  }

  WorkPointer allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::AllgatherOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("all_gather_into_tensor")) {
      return gloo->allgather_into_tensor_coalesced(outputs, inputs, opts);
    }
    check_pairs("all_gather_into_tensor", outputs, inputs);
    std::vector<Call> calls;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(calls_.all_gather("all_gather_into_tensor: output", {outputs[i]}, inputs[i]));
    }
    return group_.begin(group_.gathers, opts, {c10d::OpType::COALESCED, "shardcomm:all_gather"},
                        inputs, outputs, in_turn(std::move(calls)));
  }

  WorkPointer allgather_coalesced(std::vector<Tensors>& lists, Tensors& inputs,
                                  const c10d::AllgatherOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("all_gather_coalesced")) {
      return gloo->allgather_coalesced(lists, inputs, opts);
    }
    calls_.check_length("all_gather_coalesced: output_tensor_lists", lists);
    for (const Tensors& list : lists) check_pairs("all_gather_coalesced", list, inputs);
    std::vector<Call> calls;
    Tensors results;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      Tensors outputs;
      for (const Tensors& list : lists) outputs.push_back(list[i]);
      results.insert(results.end(), outputs.begin(), outputs.end());
      calls.push_back(
          calls_.all_gather("all_gather_coalesced: output_tensor_lists", outputs, inputs[i]));
    }
    return group_.begin(group_.gathers, opts,
                        {c10d::OpType::ALLGATHER_COALESCED, "shardcomm:all_gather"}, inputs,
                        results, in_turn(std::move(calls)));
  }

  WorkPointer broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("broadcast")) return gloo->broadcast(tensors, opts);
    return group_.begin(group_.gathers, opts, {c10d::OpType::BROADCAST, "shardcomm:broadcast"},
                        tensors, tensors,
                        calls_.broadcast(only("broadcast: tensor", tensors), opts.rootRank));
  }

  WorkPointer gather(std::vector<Tensors>& outputs, Tensors& inputs,
                     const c10d::GatherOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("gather")) {
      return gloo->gather(outputs, inputs, opts);
    }
    const Tensors gathered =
        opts.rootRank == getRank() ? only("gather: gather_list", outputs) : Tensors();
    return group_.begin(group_.gathers, opts, {c10d::OpType::GATHER, "shardcomm:gather"}, inputs,
                        gathered,
                        calls_.gather(gathered, only("gather: tensor", inputs), opts.rootRank));
  }

  WorkPointer scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                      const c10d::ScatterOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("scatter")) {
      return gloo->scatter(outputs, inputs, opts);
    }
    const Tensors parts =
        opts.rootRank == getRank() ? only("scatter: scatter_list", inputs) : Tensors();
    return group_.begin(group_.gathers, opts, {c10d::OpType::SCATTER, "shardcomm:scatter"}, parts,
                        outputs,
                        calls_.scatter(only("scatter: tensor", outputs), parts, opts.rootRank));
  }

  // Split sizes count rows, the slices of the first dimension; none: as many for each rank.
  WorkPointer alltoall_base(at::Tensor& output, at::Tensor& input,
                            std::vector<std::int64_t>& output_splits,
                            std::vector<std::int64_t>& input_splits,
                            const c10d::AllToAllOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("all_to_all_single")) {
      return gloo->alltoall_base(output, input, output_splits, input_splits, opts);
    }
    return group_.begin(group_.gathers, opts, {c10d::OpType::ALLTOALL_BASE, "shardcomm:all_to_all"},
                        {input}, {output},
                        calls_.all_to_all({output}, elements_of(output_splits, output), {input},
                                          elements_of(input_splits, input)));
  }

  WorkPointer alltoall(Tensors& outputs, Tensors& inputs,
                       const c10d::AllToAllOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("all_to_all")) {
      return gloo->alltoall(outputs, inputs, opts);
    }
    calls_.check_length("all_to_all: output_tensor_list", outputs);
    calls_.check_length("all_to_all: input_tensor_list", inputs);
    return group_.begin(
        group_.gathers, opts, {c10d::OpType::ALLTOALL, "shardcomm:all_to_all"}, inputs, outputs,
        calls_.all_to_all(outputs, Calls::numels(outputs), inputs, Calls::numels(inputs)));
  }

  WorkPointer send(Tensors& tensors, int destination, int tag) override {
    if (auto* gloo = group_.hand_to_gloo("send")) return gloo->send(tensors, destination, tag);
    return group_.messages.send(getRank(), group_.next_sequence(), only("send: tensor", tensors),
                                destination, tag);
  }

  WorkPointer recv(Tensors& tensors, int source, int tag) override {
    if (auto* gloo = group_.hand_to_gloo("recv")) return gloo->recv(tensors, source, tag);
    return group_.messages.recv(getRank(), group_.next_sequence(), only("recv: tensor", tensors),
                                source, tag);
  }

  WorkPointer recvAnysource(Tensors& tensors, int tag) override {
    if (auto* gloo = group_.hand_to_gloo("recv")) return gloo->recvAnysource(tensors, tag);
    return group_.messages.recv(getRank(), group_.next_sequence(), only("recv: tensor", tensors),
                                SHC_ANY_SOURCE, tag);
  }

  // Ends when every rank has called it, and the collectives that it has begun before have ended.
  WorkPointer barrier(const c10d::BarrierOptions& opts) override {
    if (auto* gloo = group_.hand_to_gloo("barrier")) return gloo->barrier(opts);
    return group_.begin(
        group_.gathers, opts, {c10d::OpType::BARRIER, "shardcomm:barrier"}, {}, {},
        [this, reduces = group_.reduces.begun(), of_gloo = group_.begin_barrier_of_gloo(opts)] {
          group_.wait_for_reduces(reduces);
          if (of_gloo) of_gloo->wait();
          shc::check(shc_barrier(group_.comm(), 0, nullptr));
        });
  }

  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    if (auto* gloo = group_.hand_to_gloo("monitored_barrier")) {
      return gloo->monitoredBarrier(opts, wait_all_ranks);
    }
    MonitoredBarrier(group_.comm(), getRank(), getSize(), monitored_barriers_++,
                     group_.timeout_of(opts))
        .run(wait_all_ranks);
  }

  WorkPointer allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    if (is_premultiplied(opts)) {
      multiply("all_reduce", tensors, opts.reduceOp);
      return allreduce(tensors, summing(opts));
    }
    if (auto* gloo = group_.hand_to_gloo("all_reduce")) {
      return reduce_on_gloo(tensors, opts,
                            [&](const auto& opts) { return gloo->allreduce(tensors, opts); });
    }
    const Title title{c10d::OpType::ALLREDUCE, "shardcomm:all_reduce"};
    const at::Tensor& tensor = only("all_reduce: tensor", tensors);
    if (tensor.is_sparse()) {  // a sum of what is gathered
      return group_.begin(group_.gathers, opts, title, tensors, tensors,
                          calls_.sparse_sum(tensor, opts.reduceOp));
    }
    return group_.begin(group_.reduces, opts, title, tensors, tensors,
                        calls_.all_reduce({tensor}, opts.reduceOp));
  }

  // As torch.distributed.all_reduce of a sparse tensor.
  WorkPointer allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return allreduce(tensors, opts);
  }

  WorkPointer allreduce_coalesced(Tensors& tensors,
                                  const c10d::AllreduceCoalescedOptions& opts) override {
    if (is_premultiplied(opts)) {
      multiply("all_reduce_coalesced", tensors, opts.reduceOp);
      return allreduce_coalesced(tensors, summing(opts));
    }
    if (auto* gloo = group_.hand_to_gloo("all_reduce_coalesced")) {
      return reduce_on_gloo(tensors, opts, [&](const auto& opts) {
        return gloo->allreduce_coalesced(tensors, opts);
      });
    }
    if (tensors.empty()) {
      refuse("all_reduce_coalesced: there are no tensors; there must be at least one");
    }
    return group_.begin(group_.reduces, opts,
                        {c10d::OpType::ALLREDUCE_COALESCED, "shardcomm:all_reduce"}, tensors,
                        tensors, calls_.all_reduce(tensors, opts.reduceOp));
  }

  WorkPointer reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    if (is_premultiplied(opts)) {
      if (opts.rootRank == getRank()) {
        multiply("reduce", tensors, opts.reduceOp);
        return reduce(tensors, summing(opts));
      }
      Tensors terms = products("reduce", tensors, opts.reduceOp);  // only the root's is written
      return reduce(terms, summing(opts));
    }
    if (auto* gloo = group_.hand_to_gloo("reduce")) {
      return reduce_on_gloo(tensors, opts,
                            [&](const auto& opts) { return gloo->reduce(tensors, opts); });
    }
    return group_.begin(
        group_.reduces, opts, {c10d::OpType::REDUCE, "shardcomm:reduce"}, tensors, tensors,
        calls_.reduce(only("reduce: tensor", tensors), opts.reduceOp, opts.rootRank));
  }

  WorkPointer reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                             const c10d::ReduceScatterOptions& opts) override {
    if (is_premultiplied(opts)) {
      const Tensors& parts = only("reduce_scatter: input_list", inputs);
      std::vector<Tensors> terms{products("reduce_scatter", parts, opts.reduceOp)};
      return reduce_scatter(outputs, terms, summing(opts));
    }
    if (auto* gloo = group_.hand_to_gloo("reduce_scatter")) {
      return reduce_on_gloo(outputs, opts, [&](const auto& opts) {
        return gloo->reduce_scatter(outputs, inputs, opts);
      });
    }
    const Tensors& parts = only("reduce_scatter: input_list", inputs);
    calls_.check_length("reduce_scatter: input_list", parts);
    return group_.begin(
        group_.reduces, opts, {c10d::OpType::REDUCE_SCATTER, "shardcomm:reduce_scatter"}, parts,
        outputs,
        calls_.reduce_scatter("reduce_scatter: input_list", only("reduce_scatter: output", outputs),
                              parts, opts.reduceOp));
  }

  WorkPointer _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                   const c10d::ReduceScatterOptions& opts) override {
    if (is_premultiplied(opts)) {
      Tensors terms = products("reduce_scatter_tensor", {input}, opts.reduceOp);
      return _reduce_scatter_base(output, terms.front(), summing(opts));
    }
    if (auto* gloo = group_.hand_to_gloo("reduce_scatter_tensor")) {
      return reduce_on_gloo({output}, opts, [&](const auto& opts) {
        return gloo->_reduce_scatter_base(output, input, opts);
      });
    }
    return group_.begin(
        group_.reduces, opts, {c10d::OpType::_REDUCE_SCATTER_BASE, "shardcomm:reduce_scatter"},
        {input}, {output},
        calls_.reduce_scatter("reduce_scatter_tensor: input", output, {input}, opts.reduceOp));
  }

  WorkPointer reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                              const c10d::ReduceScatterOptions& opts) override {
    if (is_premultiplied(opts)) {
      Tensors terms = products("reduce_scatter_tensor", inputs, opts.reduceOp);
      return reduce_scatter_tensor_coalesced(outputs, terms, summing(opts));
    }
    if (auto* gloo = group_.hand_to_gloo("reduce_scatter_tensor")) {
      return reduce_on_gloo(outputs, opts, [&](const auto& opts) {
        return gloo->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
      });
    }
    check_pairs("reduce_scatter_tensor", outputs, inputs);
    std::vector<Call> calls;
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      calls.push_back(calls_.reduce_scatter("reduce_scatter_tensor: input", outputs[i], {inputs[i]},
                                            opts.reduceOp));
    }
    return group_.begin(group_.reduces, opts, {c10d::OpType::COALESCED, "shardcomm:reduce_scatter"},
                        inputs, outputs, in_turn(std::move(calls)));
  }

 private:
  // Reduces into `results` by `reduce`, which calls Gloo with options like `opts`. Gloo has no
  // averages of integers: they are its sums, divided here.
  template <class Options, class Reduce>
  WorkPointer reduce_on_gloo(const Tensors& results, const Options& opts, Reduce&& reduce) {
    const bool integers =
        !results.empty() && c10::isIntegralType(results.front().scalar_type(), false);
    if (opts.reduceOp != c10d::ReduceOp::AVG || !integers) return reduce(opts);
    return group_.begin(group_.reduces, opts,
                        {c10d::OpType::UNKNOWN, "shardcomm:average_of_integers"}, results, results,
                        [this, results, summed = reduce(summing(opts))] {
                          summed->wait();
                          const c10::InferenceMode mode;  // as in Flat
                          for (const at::Tensor& result : results) {
                            result.detach().div_(getSize(), "trunc");
                          }
                        });
  }

  // The lists that torch gives have an entry for each of this process's devices: one.
  template <class Entry>
  static const Entry& only(const char* name, const std::vector<Entry>& entries) {
    if (entries.size() == 1) return entries.front();
    refuse(name, ": there are ", entries.size(),
           "; there must be one: call a coalesced form for several");
  }

  static void check_pairs(const char* operation, const Tensors& outputs, const Tensors& inputs) {
    if (outputs.size() == inputs.size()) return;
    refuse(operation, ": there are ", outputs.size(), " outputs and ", inputs.size(),
           " inputs; there must be as many");
  }

  // How many elements each rank has of `tensor`, of which it has `splits` rows.
  std::vector<std::int64_t> elements_of(const std::vector<std::int64_t>& splits,
                                        const at::Tensor& tensor) const {
    c10d::checkSplitSizes(splits, tensor, getSize());
    if (splits.empty()) {
      return std::vector<std::int64_t>(static_cast<std::size_t>(getSize()),
                                       tensor.numel() / getSize());
    }
    const std::int64_t row = tensor.size(0) == 0 ? 1 : tensor.numel() / tensor.size(0);
    std::vector<std::int64_t> counts;
    for (const std::int64_t rows : splits) counts.push_back(rows * row);
    return counts;
  }

  static Call in_turn(std::vector<Call> calls) {
    if (calls.size() == 1) return std::move(calls.front());
    return [calls = std::move(calls)] {
      for (const Call& call : calls) call();
    };
  }

  Group group_;
  const Calls calls_;
  std::atomic<std::int64_t> monitored_barriers_{0};
};

}  // namespace shardcomm_torch
