// Reads the JSON that this project writes: objects, lists, strings without escapes and whole
// numbers. No more, so that the core needs no library for it (RFC 8259 has the rest).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace shardcomm::abi {

class Json {
 public:
  using List = std::vector<Json>;
  using Object = std::map<std::string, Json>;

  // Throws std::invalid_argument, which tells the character where the text is something else.
  static Json parse(const std::string& text);

  explicit Json(std::variant<std::int64_t, std::string, List, Object> value)
      : value_(std::move(value)) {}

  // What the value is; `name` is what the sentence calls it if it is something else.
  std::int64_t number(const std::string& name) const;
  const std::string& string(const std::string& name) const;
  const List& list(const std::string& name) const;
  // A member of an object. Throws std::invalid_argument if there is none.
  const Json& at(const std::string& key) const;

 private:
  std::variant<std::int64_t, std::string, List, Object> value_;
};

// The number `value` as an int, between `least` and `most`.
int int_in(const Json& value, const std::string& name, std::int64_t least, std::int64_t most);

}  // namespace shardcomm::abi
