"""Ordinary classes, for the schemas that pydantic makes of them."""

import datetime as dt
import enum
import ipaddress
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, NamedTuple, TypeVar

import pydantic
from annotated_types import Len
from pydantic import BaseModel, ConfigDict, Field, HttpUrl, RootModel, StringConstraints
from typing_extensions import TypedDict

Email = Annotated[str, Field(json_schema_extra={"format": "email"})]
Slug = Annotated[str, StringConstraints(pattern=r"^[a-z0-9]+(?:-[a-z0-9]+)*$", max_length=40)]
Code = Annotated[str, StringConstraints(pattern=r"^[A-Z0-9_-]+$", min_length=2, max_length=12)]
T = TypeVar("T")


class Color(enum.Enum):
    RED = "red"
    GREEN = "green"
    BLUE = "blue"


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2


class Sum(BaseModel):
    question: str
    answer: int
    is_sure: bool


class Person(BaseModel):
    name: str = Field(min_length=1, max_length=30)
    age: int = Field(ge=0, le=150)
    email: Email
    nickname: str | None = None


class Address(BaseModel):
    """Where somebody lives."""

    street: str
    zip_code: str = Field(pattern=r"^\d{5}(-\d{4})?$")
    country: Literal["CH", "DE", "FR"] = "CH"


class Customer(Person):
    home: Address
    others: list[Address] = Field(default_factory=list, max_length=3)


class Money(BaseModel):
    amount: Decimal
    currency: Annotated[str, Field(min_length=3, max_length=3)]


class Price(BaseModel):
    net: Decimal = Field(max_digits=8, decimal_places=2)
    gross: Decimal = Field(gt=0)
    tax: Annotated[float, Field(ge=0, le=1)]


class Steps(BaseModel):
    volume: int = Field(multiple_of=5, ge=0, le=100)
    price: float = Field(multiple_of=0.05, gt=0, lt=1000)
    large: int = Field(multiple_of=10, ge=0, le=1_000_000)


class Floats(BaseModel):
    share: pydantic.NonNegativeFloat
    below: pydantic.NegativeFloat
    finite: pydantic.FiniteFloat
    some: float = Field(gt=-1.5, lt=2.25)


class Integers(BaseModel):
    count: pydantic.PositiveInt
    offset: pydantic.NonPositiveInt
    port: int = Field(ge=1, le=65535)
    strict: pydantic.StrictInt


class Link(BaseModel):
    url: HttpUrl
    any_url: pydantic.AnyUrl
    title: str | None = Field(None, max_length=80)


class Databases(BaseModel):
    postgres: pydantic.PostgresDsn
    redis: pydantic.RedisDsn = pydantic.RedisDsn("redis://localhost:6379/0")


class Meeting(BaseModel):
    day: dt.date
    at: dt.time
    begins: dt.datetime
    lasts: dt.timedelta


class Zoned(BaseModel):
    aware: pydantic.AwareDatetime
    naive: pydantic.NaiveDatetime
    past: pydantic.PastDate
    future: pydantic.FutureDatetime


class Identified(BaseModel):
    id: uuid.UUID
    version4: pydantic.UUID4
    parent: uuid.UUID | None = None


class Addresses(BaseModel):
    v4: ipaddress.IPv4Address
    v6: ipaddress.IPv6Address
    either: pydantic.IPvAnyAddress


class Networks(BaseModel):
    v4: ipaddress.IPv4Network
    v6: ipaddress.IPv6Interface


class Files(BaseModel):
    path: Path
    content: bytes
    encoded: pydantic.Base64Bytes
    text: pydantic.Base64Str


class Secret(BaseModel):
    password: pydantic.SecretStr = Field(min_length=8)
    key: pydantic.SecretBytes


class Enums(BaseModel):
    color: Color
    level: Level
    both: Color | Level


class Literals(BaseModel):
    kind: Literal["a"]
    number: Literal[1, 2, 3]
    mixed: Literal["x", 1, True, None]


class Optionals(BaseModel):
    a: int | None
    b: str | None = None
    c: Color | None = None
    d: list[int] | None = None


class Unions(BaseModel):
    value: int | str | bool
    items: list[int | str]
    model: Address | Sum


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int = Field(ge=1, le=9)


class Dog(BaseModel):
    kind: Literal["dog"]
    breed: str | None = None


class Pet(BaseModel):
    pet: Cat | Dog = Field(discriminator="kind")
    others: list[Annotated[Cat | Dog, Field(discriminator="kind")]] = []


class Tree(BaseModel):
    value: int
    children: list["Tree"] = []


class Linked(BaseModel):
    value: str
    next: "Linked | None" = None


class Expression(BaseModel):
    left: "int | Expression"
    operator: Literal["+", "-", "*"]
    right: "int | Expression"


class Husband(BaseModel):
    wife: "Wife | None" = None


class Wife(BaseModel):
    husband: Husband | None = None
    name: str


class Maps(BaseModel):
    scores: dict[str, float]
    by_number: dict[int, str]
    nested: dict[str, list[Address]]


class MapsOfKnown(BaseModel):
    by_literal: dict[Literal["a", "b"], int]
    by_color: dict[Color, str]


class MapsOfPatterns(BaseModel):
    named: dict[Annotated[str, StringConstraints(pattern=r"^x_[a-z]+$")], int]
    short: dict[Annotated[str, StringConstraints(min_length=1, max_length=8)], bool]
    by_id: dict[uuid.UUID, str]
    by_day: dict[dt.date, int]


class MapsWithin(BaseModel):
    some: dict[str, int] = Field(min_length=1, max_length=3)


class Tuples(BaseModel):
    point: tuple[float, float]
    mixed: tuple[int, str, bool | None]
    many: tuple[int, ...]


class Point(NamedTuple):
    x: float
    y: float = 0.0


class NamedTuples(BaseModel):
    point: Point
    path: list[Point] = Field(min_length=1, max_length=4)


class SetsOfKnown(BaseModel):
    colors: set[Color]
    flags: frozenset[Literal["a", "b", "c"]] = Field(min_length=1)
    bits: set[bool]


class Tags(BaseModel):
    tags: set[str]


class Lists(BaseModel):
    names: list[str] = Field(min_length=1, max_length=5)
    grid: Annotated[list[Annotated[list[int], Len(2, 2)]], Len(2, 2)]
    anything: list[Any]


class Strings(BaseModel):
    slug: Slug
    code: Code
    upper: Annotated[str, StringConstraints(to_upper=True, strip_whitespace=True)]
    exact: Annotated[str, StringConstraints(min_length=4, max_length=4, pattern="^[0-9a-f]+$")]


class Patterns(BaseModel):
    plate: str = Field(pattern=r"^[A-Z]{1,2}-\d{1,4}$")
    contains: str = Field(pattern="@")
    begins: str = Field(pattern="^https://")
    quoted: str = Field(pattern=r'^[a"\\]{3}$')
    phone: str = Field(pattern=r"^\+?[1-9]\d{1,14}$")
    password: str = Field(pattern=r"^.*[A-Z].*$", min_length=8, max_length=20)


class Described(BaseModel):
    a: str = Field(description="The first.", examples=["x", "y"], title="First")
    b: int = Field(3, description="The second.", deprecated=True)
    c: str = Field(alias="see", json_schema_extra={"x-order": 1})


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid", title="Closed one")
    a: int
    b: Address


class Open(BaseModel):
    model_config = ConfigDict(extra="allow")
    a: int


class OpenOfIntegers(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, int] = Field(init=False)
    name: str


class Empty(BaseModel):
    pass


class Anything(BaseModel):
    any: Any
    obj: object
    data: dict[str, Any]
    none: None
    json_value: pydantic.JsonValue


class Response(BaseModel, Generic[T]):
    data: T
    error: str | None = None


class Page(BaseModel, Generic[T]):
    items: list[T]
    total: int = Field(ge=0)
    next_page: HttpUrl | None = None


class Movie(TypedDict, total=False):
    title: str
    year: int


class Movies(BaseModel):
    best: Movie
    all: list[Movie]


@pydantic.dataclasses.dataclass
class Shape:
    name: str
    sides: int = Field(default=3, ge=3)
    color: Color = Color.RED


class Shapes(BaseModel):
    shapes: list[Shape]


class Ids(RootModel[list[int]]):
    pass


class Mapping(RootModel[dict[str, Address]]):
    pass


class Choice(RootModel[Cat | Dog]):
    pass


class Entity(BaseModel):
    """Something named in a text."""

    text: str = Field(description="As it is written.")
    label: Literal["PERSON", "ORG", "GPE", "DATE"]
    start: int = Field(ge=0)
    confidence: float = Field(ge=0.0, le=1.0)


class Extraction(BaseModel):
    entities: list[Entity] = Field(max_length=4)
    language: str = Field(pattern="^[a-z]{2}(-[A-Z]{2})?$")


class Ticket(BaseModel):
    title: str = Field(min_length=5, max_length=60)
    priority: int = Field(ge=1, le=5)
    labels: list[Literal["bug", "feature"]] = Field(default=[], max_length=2)
    due: dt.date | None = None
    reporter: Person


class Invoice(BaseModel):
    number: str = Field(pattern=r"^INV-\d{6}$")
    lines: list[Price] = Field(min_length=1, max_length=2)
    paid_at: dt.datetime | None = None
    total: Decimal = Field(ge=0, decimal_places=2)


class Sizes(BaseModel):
    file: pydantic.ByteSize
    timeout: Annotated[int, Field(ge=0), Field(le=600)] = 60


CLASSES: list[Any] = [
    Sum, Person, Address, Customer, Money, Price, Steps, Floats, Integers, Link,
    Databases, Meeting, Zoned, Identified, Addresses, Networks, Files, Secret, Enums, Literals,
    Optionals, Unions, Pet, Tree, Linked, Expression, Husband, Maps, MapsOfKnown, MapsOfPatterns,
    MapsWithin, Tuples, NamedTuples, SetsOfKnown, Tags, Lists, Strings, Patterns, Described, Closed,
    Open, OpenOfIntegers, Empty, Anything, Response[int], Response[Address], Page[Sum], Movies,
    Shapes, Ids, Mapping, Choice, Extraction, Ticket, Invoice, Sizes,
]  # fmt: skip
