#include "clients/client_index.h"

#include <algorithm>

namespace fedcore {

std::int64_t ClientIndex::number(const ClientId& id) const {
    if (is_counted(id)) return left_.find(id) == kNone ? static_cast<std::int64_t>(id.number) : kNone;
    const std::int64_t place = listed_.find(id);
    return place == kNone ? kNone : count_ + place;
}

bool ClientIndex::taken(std::int64_t number) const {
    if (number < 0) return false;
    if (number >= count_) return listed_.taken(number - count_);
    return left_.find({false, static_cast<std::uint64_t>(number), {}}) == kNone;
}

ClientId ClientIndex::id_of(std::int64_t number) const {
    if (number < count_) return {false, static_cast<std::uint64_t>(number), {}};
    return listed_.at(number - count_);
}

std::int64_t ClientIndex::add(const ClientId& id) {
    if (is_counted(id)) return left_.erase(id) == kNone ? kNone : static_cast<std::int64_t>(id.number);
    const std::int64_t place = listed_.insert(id);
    return place == kNone ? kNone : count_ + place;
}

bool ClientIndex::add_at(const ClientId& id, std::int64_t number) {
    return !is_counted(id) && listed_.insert_at(id, number - count_);
}

std::int64_t ClientIndex::remove(const ClientId& id) {
    if (is_counted(id)) return left_.insert(id) == kNone ? kNone : static_cast<std::int64_t>(id.number);
    const std::int64_t place = listed_.erase(id);
    return place == kNone ? kNone : count_ + place;
}

std::vector<std::int64_t> ClientIndex::left() const {
    std::vector<std::int64_t> ids;
    ids.reserve(static_cast<std::size_t>(left_.size()));
    for (std::int64_t place = 0; place < left_.places(); ++place)
        if (left_.taken(place)) ids.push_back(static_cast<std::int64_t>(left_.at(place).number));
    std::sort(ids.begin(), ids.end());
    return ids;
}

}  // namespace fedcore
