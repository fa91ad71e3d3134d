// Copy plans, in C.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <memory>
#include <utility>
#include <vector>

#include "abi/arguments.h"
#include "abi/handles.h"
#include "abi/status.h"
#include "copy/bound_copy.h"
#include "shardcomm.h"
#include "shardcomm/copy_plan.h"
#include "shardcomm/stream.h"

using shardcomm::abi::checked;
using shardcomm::abi::dtype_of;
using shardcomm::abi::guarded;
using shardcomm::abi::hand_over;
using shardcomm::abi::required;

shc_status shc_copy_plan_create(const shc_segment* segments, size_t count, shc_dtype src_dtype,
                                shc_dtype dst_dtype, shc_copy_plan** plan) {
  return guarded("shc_copy_plan_create", [&] {
    shc_copy_plan*& result = required(plan, "plan");
    if (count > 0) required(segments, "segments");
    std::vector<shardcomm::Segment> all;
    all.reserve(count);
    std::transform(segments, segments + count, std::back_inserter(all), [](const shc_segment& s) {
      return shardcomm::Segment{s.src,        s.dst,       s.src_offset, s.src_pitch,
                                s.dst_offset, s.dst_pitch, s.rows,       s.cols};
    });
    hand_over(result, std::make_unique<shc_copy_plan>(std::make_shared<const shardcomm::CopyPlan>(
                          std::move(all), dtype_of(src_dtype, "src_dtype"),
                          dtype_of(dst_dtype, "dst_dtype"))));
  });
}

void shc_copy_plan_destroy(shc_copy_plan* plan) { shardcomm::abi::destroy(plan); }

shc_status shc_copy_plan_operands(const shc_copy_plan* plan, size_t* sources,
                                  size_t* destinations) {
  return guarded("shc_copy_plan_operands", [&] {
    const shardcomm::CopyPlan& known = *checked(plan, "plan").plan;
    size_t& from = required(sources, "sources");
    required(destinations, "destinations") = known.dst_extents().size();
    from = known.src_extents().size();
  });
}

shc_status shc_copy_plan_extents(const shc_copy_plan* plan, int64_t* source_elements,
                                 int64_t* destination_elements) {
  return guarded("shc_copy_plan_extents", [&] {
    const shardcomm::CopyPlan& known = *checked(plan, "plan").plan;
    const auto write = [](const std::vector<std::int64_t>& extents, int64_t* to, const char* name) {
      if (!extents.empty()) required(to, name);
      std::copy(extents.begin(), extents.end(), to);
    };
    write(known.src_extents(), source_elements, "source_elements");
    write(known.dst_extents(), destination_elements, "destination_elements");
  });
}

shc_status shc_copy_bind(const shc_copy_plan* plan, const void* const* sources,
                         void* const* destinations, int threads, int device, shc_copy** copy) {
  return guarded("shc_copy_bind", [&] {
    shc_copy*& result = required(copy, "copy");
    const auto known = checked(plan, "plan").plan;
    const std::size_t from = known->src_extents().size();
    const std::size_t to = known->dst_extents().size();
    if (from > 0) required(sources, "sources");
    if (to > 0) required(destinations, "destinations");
    shardcomm::abi::check_device(device);
    hand_over(result, std::make_unique<shc_copy>(
                          shardcomm::BoundCopy(
                              known, std::vector<const void*>(sources, sources + from),
                              std::vector<void*>(destinations, destinations + to), threads, device),
                          device));
  });
}

shc_status shc_copy_run(const shc_copy* copy, const shc_copy_options* options, shc_stream* stream) {
  return guarded("shc_copy_run", [&] {
    const shc_copy& bound = checked(copy, "copy");
    const shc_copy_options given =
        shardcomm::abi::options_of("options", options, shc_copy_options SHC_COPY_OPTIONS_INIT);
    const shardcomm::CopyOptions how{given.scale, given.accumulate != 0, given.nonfinite};
    shardcomm::check_options(bound.bound.plan(), how);
    shardcomm::abi::run_on(
        stream, bound.device,
        [bound = bound.bound, how](shardcomm::NativeStream native) { bound.run(how, native); });
  });
}

void shc_copy_destroy(shc_copy* copy) { shardcomm::abi::destroy(copy); }
