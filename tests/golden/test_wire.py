"""The wire contract as text: what was sent once is understood for ever (F94)."""

from pathlib import Path

from google.protobuf.descriptor_pb2 import FieldDescriptorProto

from holdfast.v1 import agent_pb2, common_pb2, metadata_pb2, persistence_pb2

GOLDEN = Path(__file__).parent / "wire-v3.txt"
TYPES = {number: name for name, number in FieldDescriptorProto.Type.items()}


def lines():
    for module in (agent_pb2, common_pb2, metadata_pb2, persistence_pb2):
        file = module.DESCRIPTOR
        for service in file.services_by_name.values():
            for method in service.methods:
                taken, given = method.input_type.name, method.output_type.name
                yield f"rpc {service.full_name}.{method.name}({taken}) -> {given}"
        for message in file.message_types_by_name.values():
            yield from message_lines(message)


def message_lines(message):
    for field in message.fields:
        kind = field.message_type or field.enum_type
        type_name = kind.full_name if kind else TYPES[field.type][5:].lower()
        repeated = "repeated " if field.is_repeated else ""
        yield f"{message.full_name} {field.number} {field.name}: {repeated}{type_name}"
    for enum in message.enum_types:
        yield from (f"{enum.full_name} {value.number} {value.name}" for value in enum.values)
    for nested in message.nested_types:
        yield from message_lines(nested)


def test_no_field_call_or_number_has_gone_or_changed():
    gone = set(GOLDEN.read_text().splitlines()) - set(lines())

    assert not gone, (
        f"the wire lost {sorted(gone)}: old peers still send it. Put it back, or mark it reserved, "
        f"raise rpc.protocol.PROTOCOL and change tests/golden/wire-v3.txt in the same commit"
    )


def test_what_is_new_is_written_down():
    new = set(lines()) - set(GOLDEN.read_text().splitlines())

    assert not new, f"add to tests/golden/wire-v3.txt:\n{chr(10).join(sorted(new))}"
