"""A pytest plugin that keeps the first, ninth, seventeenth case of each test function, and so on."""


def pytest_collection_modifyitems(items):
    seen = {}
    for item in tuple(items):
        name = item.nodeid.partition("[")[0]
        seen[name] = seen.get(name, -1) + 1
        if seen[name] % 8:
            items.remove(item)
