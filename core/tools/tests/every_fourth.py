"""A plugin of pytest: the first of each test function's cases, and every fourth behind it."""


def pytest_collection_modifyitems(items):
    seen = {}
    for item in tuple(items):
        name = item.nodeid.partition("[")[0]
        seen[name] = seen.get(name, -1) + 1
        if seen[name] % 4:
            items.remove(item)
