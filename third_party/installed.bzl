"""The constraint behind each library that a machine may lack."""

def installed_constraint():
    """Declares :installed in a dependency's package: a constraint value that no platform has.

    Where the library is not found, its targets ask for it. Bazel then skips them and whatever
    depends on them, and its message names the library: "didn't satisfy constraint
    //third_party/hdf5:installed".
    """
    native.constraint_setting(
        name = "installation",
        visibility = ["//visibility:public"],
    )
    native.constraint_value(
        name = "installed",
        constraint_setting = ":installation",
        visibility = ["//visibility:public"],
    )
