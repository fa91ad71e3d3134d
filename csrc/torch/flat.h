// Tensors as one range of memory.
#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace shardcomm_torch {

// Tensors of one dtype, one after another: their own memory if it is so already, and aligned, else
// a copy. It is the memory that they have now: a program may set their `data` before the call runs.
class Flat {
 public:
  // `copied`: a copy in any case.
  explicit Flat(std::vector<at::Tensor> tensors, bool copied = false)
      : tensors_(detached(std::move(tensors))), copied_(copied || !is_one_range()) {
    for (const at::Tensor& tensor : tensors_) numel_ += tensor.numel();
    if (copied_) copy_ = at::empty({numel_}, tensors_.front().options().requires_grad(false));
  }

  // The same tensors, copied.
  Flat copied() const { return Flat(tensors_, true); }

  std::int64_t numel() const { return numel_; }
  std::size_t bytes() const {
    return static_cast<std::size_t>(numel_) * tensors_.front().element_size();
  }
  void* data() const { return (copied_ ? copy_ : tensors_.front()).data_ptr(); }

  // Copies the tensors' values into the range, unless it is their memory.
  void load() const {
    each([](const at::Tensor& tensor, const at::Tensor& part) { part.copy_(tensor); });
  }
  // Copies the range's values into the tensors, unless it is their memory.
  void store() const {
    each([](const at::Tensor& tensor, const at::Tensor& part) { tensor.copy_(part); });
  }
  // The same, after which autograd knows that the tensors have changed, also where nothing was
  // copied: a backward that needs their former values raises, as after Gloo's copies.
  void store_anew() const {
    store();
    if (copied_) return;
    for (const at::Tensor& tensor : tensors_) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    }
  }

 private:
  static std::vector<at::Tensor> detached(std::vector<at::Tensor> tensors) {
    for (at::Tensor& tensor : tensors) {
      // A view of memory that was freed has an address all the same: its offset.
      TORCH_CHECK_VALUE(
          tensor.numel() == 0 || tensor.storage().data() != nullptr, "a tensor of shape ",
          tensor.sizes(),
          " has no memory: its storage was freed, as untyped_storage().resize_(0) does");
      tensor = tensor.detach();
    }
    return tensors;
  }

  template <class Copy>
  void each(Copy&& copy) const {
    if (!copied_) return;
    const c10::InferenceMode mode;  // it may write to tensors of that mode, on any thread
    std::int64_t begin = 0;
    for (const at::Tensor& tensor : tensors_) {
      const std::int64_t end = begin + tensor.numel();
      copy(tensor, copy_.slice(0, begin, end).view(tensor.sizes()));
      begin = end;
    }
  }

  // Whether the memory of each tensor holds its values in order, and begins where the one before
  // ends, and the first where an element of the dtype may.
  bool is_one_range() const {
    const auto* address = static_cast<const std::byte*>(tensors_.front().data_ptr());
    const std::size_t width = tensors_.front().element_size();
    if (reinterpret_cast<std::uintptr_t>(address) % width != 0) return false;
    for (const at::Tensor& tensor : tensors_) {
      if (!tensor.is_contiguous() || tensor.is_neg() || tensor.is_conj()) return false;
      if (tensor.data_ptr() != address || !tensor.is_alias_of(tensors_.front())) return false;
      address += tensor.nbytes();
    }
    return true;
  }

  std::vector<at::Tensor> tensors_;
  bool copied_;
  std::int64_t numel_ = 0;
  at::Tensor copy_;
};

inline bool overlap(const Flat& one, const Flat& other) {
  const auto* first = static_cast<const std::byte*>(one.data());
  const auto* second = static_cast<const std::byte*>(other.data());
  return first < second + other.bytes() && second < first + one.bytes();
}

// Whether no two of the tensors have memory in common, as far as their ranges tell.
inline bool are_apart(const std::vector<at::Tensor>& tensors) {
  std::vector<std::pair<const char*, const char*>> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_sparse() || tensor.numel() == 0) continue;
    std::int64_t last = 0;  // the offset of the last element
    for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) {
      last += (tensor.size(dim) - 1) * tensor.stride(dim);
    }
    const auto* begin = static_cast<const char*>(tensor.data_ptr());
    ranges.emplace_back(begin, begin + (last + 1) * tensor.element_size());
  }
  std::sort(ranges.begin(), ranges.end());
  for (std::size_t i = 1; i < ranges.size(); ++i) {
    if (ranges[i].first < ranges[i - 1].second) return false;
  }
  return true;
}

// Whether `part` is the memory of `whole` from `offset` bytes on.
inline bool is_at(const Flat& part, const Flat& whole, std::size_t offset) {
  return part.data() == static_cast<const std::byte*>(whole.data()) + offset;
}

}  // namespace shardcomm_torch
