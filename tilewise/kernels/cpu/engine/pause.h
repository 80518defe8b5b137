#pragma once

// What a long task asks now and then: true, and it may stop, as its results are not wanted any more.
struct Pause {
    bool (*ask)(void*);
    void* with;
    bool operator()() const { return ask(with); }
};
