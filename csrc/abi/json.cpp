#include "abi/json.h"

#include <charconv>
#include <cstddef>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace shardcomm::abi {
namespace {

class Reader {
 public:
  explicit Reader(const std::string& text) : text_(text) {}

  Json whole() {
    Json value = any(0);
    if (next() != kEnd) refuse("the end");
    return value;
  }

 private:
  static constexpr char kEnd = '\0';
  static constexpr int kDeepest = 16;

  Json any(int depth) {
    if (depth > kDeepest) refuse("fewer brackets inside one another");
    switch (next()) {
      case '{':
        return object(depth);
      case '[':
        return list(depth);
      case '"':
        return Json(string());
      default:
        return Json(number());
    }
  }

  Json object(int depth) {
    Json::Object members;
    take('{', "'{'");
    while (next() != '}') {
      if (!members.empty()) take(',', "',' or '}'");
      next();
      std::string key = string();
      take(':', "':'");
      if (!members.emplace(std::move(key), any(depth + 1)).second) refuse("each name once");
    }
    ++at_;
    return Json(std::move(members));
  }

  Json list(int depth) {
    Json::List items;
    take('[', "'['");
    while (next() != ']') {
      if (!items.empty()) take(',', "',' or ']'");
      items.push_back(any(depth + 1));
    }
    ++at_;
    return Json(std::move(items));
  }

  std::string string() {
    take('"', "'\"'");
    const std::size_t end = text_.find_first_of("\"\\", at_);
    if (end == std::string::npos || text_[end] == '\\') refuse("a string without '\\'");
    std::string value = text_.substr(at_, end - at_);
    at_ = end + 1;
    return value;
  }

  std::int64_t number() {
    std::int64_t value = 0;
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error != std::errc()) refuse("'{', '[', '\"' or a whole number of 64 bits");
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

  // The next character that is no space.
  char next() {
    at_ = text_.find_first_not_of(" \t\r\n", at_);
    if (at_ == std::string::npos) at_ = text_.size();
    return at_ < text_.size() ? text_[at_] : kEnd;
  }

  void take(char wanted, const char* name) {
    if (next() != wanted) refuse(name);
    ++at_;
  }

  [[noreturn]] void refuse(const char* expected) const {
    throw std::invalid_argument("the text is no JSON of shardcomm's: at character " +
                                std::to_string(at_) + " there must be " + expected);
  }

  const std::string& text_;
  std::size_t at_ = 0;
};

template <class T, class Variant>
const T& get(const Variant& value, const std::string& name, const char* kind) {
  const T* found = std::get_if<T>(&value);
  if (found == nullptr) throw std::invalid_argument(name + " must be " + kind);
  return *found;
}

}  // namespace

Json Json::parse(const std::string& text) { return Reader(text).whole(); }

std::int64_t Json::number(const std::string& name) const {
  return get<std::int64_t>(value_, name, "a whole number");
}

const std::string& Json::string(const std::string& name) const {
  return get<std::string>(value_, name, "a string");
}

const Json::List& Json::list(const std::string& name) const {
  return get<List>(value_, name, "a list");
}

const Json& Json::at(const std::string& key) const {
  const auto& members = get<Object>(value_, "what holds \"" + key + "\"", "an object");
  const auto found = members.find(key);
  if (found == members.end()) throw std::invalid_argument("the text has no \"" + key + "\"");
  return found->second;
}

int int_in(const Json& value, const std::string& name, std::int64_t least, std::int64_t most) {
  const std::int64_t number = value.number(name);
  if (number < least || number > most) {
    throw std::invalid_argument(name + " is " + std::to_string(number) + "; it must be " +
                                std::to_string(least) + " to " + std::to_string(most));
  }
  return static_cast<int>(number);
}

}  // namespace shardcomm::abi
