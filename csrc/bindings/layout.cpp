#include "shardcomm/layout.h"

#include <tuple>

#include "bindings/bindings.h"

namespace shardcomm::bindings {

void bind_layout(py::module_& m) {
  m.def(
      "plan_layout",
      [](const std::vector<std::tuple<std::int64_t, std::int64_t, std::int64_t>>& params,
         int world_size, std::int64_t align_elements) {
        std::vector<ParamExtent> extents;
        extents.reserve(params.size());
        for (const auto& [rows, row_elements, granule_rows] : params) {
          extents.push_back({rows, row_elements, granule_rows});
        }
        const LayoutResult result = plan_layout(extents, world_size, align_elements);
        return py::make_tuple(result.shard_elements, result.offsets, result.forced_by);
      },
      py::arg("params"), py::arg("world_size"), py::arg("align_elements"));
}

}  // namespace shardcomm::bindings
